"""`specroll bench methods`: SpecRoll, its parts and its rivals while GRPO trains, in one engine and one process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specroll.cli.common import check_at_least, check_writable
from specroll.cli.measure import Results, finish, go_through, head_of
from specroll.config import TrainConfig

if TYPE_CHECKING:
    from specroll.bench.methods import Setting
    from specroll.cli.progress import Progress
    from specroll.train.data import Task


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with GRPO while every step is sampled by all methods in turn, in every setting: each model with its heads,
    on each data set, with each top_p and each batch. All sample the same tokens, so one training serves all.
    """

    models: tuple[str, ...]
    """Local folders or names on the hub."""
    heads: tuple[Path, ...]
    """Folders of heads fitted to them, in the same order."""
    drafters: tuple[Path, ...] = ()
    """Folders of the rival's drafters for them (specroll drafter fit), where fastgrpo is measured."""
    methods: tuple[str, ...] = ("heads",)
    """Methods besides plain decoding: heads, suffix, specroll (both together), fastgrpo (tuned at first)."""
    data: tuple[str, ...] = ("gsm8k", "math35")
    """Where the prompts come from: task names or JSON Lines files."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines (also SPECROLL_DATA)."""
    top_p: tuple[float, ...] = (0.95, 1.0)
    """Of the law that responses are drawn from, at temperature 1; 1 is off."""
    batches: tuple[str, ...] = ("1x4", "1x8", "8x8")
    """Batches of a step, PROMPTSxRESPONSES."""
    steps: int = 24
    """Optimizer steps of a training, all epochs together."""
    epochs: int = 2
    """Passes over a training's prompts."""
    seeds: int = 1
    """Trainings of a setting: seeds 0, 1, .., each with other prompts and other draws."""
    tokens: int = 96
    """Most tokens of a response."""
    learning_rate: float = TrainConfig.learning_rate
    """Of the policy's adapter, constant over the run."""
    max_nodes: int = TrainConfig.max_nodes
    """Most tree nodes per sequence."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto is bfloat16 where the device has units for it, else float32."""
    json: Path | None = None
    """Write the results here (keys: docs/commands.md); the same command goes on from there after an interruption."""

    def __post_init__(self) -> None:
        check_at_least(
            1, steps=self.steps, epochs=self.epochs, seeds=self.seeds, tokens=self.tokens, max_nodes=self.max_nodes
        )
        if len(self.models) != len(self.heads):
            raise ValueError(f"give heads to each model: {len(self.models)} models, {len(self.heads)} folders of heads")
        wanted = len(self.models) if "fastgrpo" in self.methods else 0
        if len(self.drafters) != wanted:
            raise ValueError(
                f"fastgrpo needs a drafter for each model, and nothing else does: {wanted} needed, got "
                f"{len(self.drafters)} (specroll drafter fit makes one)"
            )
        if self.steps % self.epochs:
            raise ValueError(f"epochs must divide the steps, got {self.steps} steps in {self.epochs} epochs")
        if bad := [b for b in self.batches if not re.fullmatch("[1-9][0-9]*x([2-9]|[1-9][0-9]+)", b)]:
            raise ValueError(f"a batch is PROMPTSxRESPONSES with two responses or more, such as 1x8; got {bad[0]!r}")
        if unknown := [m for m in self.methods if m not in _METHODS]:
            raise ValueError(f"methods are {', '.join(_METHODS)}; got {unknown[0]!r}")
        for name in ("models", "methods", "data", "top_p", "batches"):
            if not getattr(self, name):
                raise ValueError(f"nothing to measure: {name.replace('_', '-')} is empty")


_METHODS = ("heads", "suffix", "specroll", "fastgrpo")


def main(options: Options) -> int:
    # A measurement is made of local files; nobody is told of it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from specroll.bench.methods_stats import summaries
    from specroll.cli.bench_view import show_methods
    from specroll.model.load import load_model
    from specroll.train.data import load_task
    from specroll.train.quiet import quiet

    check_writable(options.json)
    with quiet():
        tasks = {data: load_task(data, data_dir=options.data_dir) for data in options.data}
        model, _ = load_model(options.models[0], dtype=options.dtype)
        results: Results = head_of(model)
        del model
        settings = _settings(options)
        tuning: dict[str, Callable[[Progress], Results]] = {}
        cells: dict[str, Callable[[Progress], Results]] = {}
        for setting in settings:
            if setting.drafter is not None and _form(setting) not in tuning:
                tuning[_form(setting)] = partial(_tune, options, setting, tasks[setting.data])
            for seed in range(options.seeds):
                cells |= _cells(options, setting, tasks[setting.data], seed, results)
        if tuning:
            go_through(options.json, results, tuning, lambda found: {}, _show_tuning, key="tuning")
        go_through(options.json, results, cells, lambda found: summaries(found.values()), _show)
    show_methods(results)
    finish(options, results)
    return 0


def _settings(options: Options) -> list[Setting]:
    from specroll.bench.methods import Setting

    drafters = options.drafters or (None,) * len(options.models)
    return [
        Setting(model, str(heads), data, top_p, batch, None if drafter is None else str(drafter))
        for model, heads, drafter in zip(options.models, options.heads, drafters, strict=True)
        for data in options.data
        for top_p in options.top_p
        for batch in options.batches
    ]


def _form(setting: Setting) -> str:
    """What the rival is tuned for, once: by the first data and top_p of the options."""
    return f"{setting.model} {setting.batch}"


def _tune(options: Options, setting: Setting, task: Task, progress: Progress) -> Results:
    from specroll.bench.methods_tuning import rollouts, tune

    done, total = count(1), rollouts(setting)
    stage = f"tuning fastgrpo, {_form(setting)}"
    found = tune(
        setting,
        _config(options, setting),
        task,
        lambda name, rate: progress(stage, next(done), total, f"{name}: {rate:.0f} tokens/s"),
    )
    return {"data": setting.data, "top_p": setting.top_p, **found}


def _cells(
    options: Options, setting: Setting, task: Task, seed: int, results: Results
) -> dict[str, Callable[[Progress], Results]]:
    """One cell per method. They are measured together, by the first of them that is missing."""
    measured: dict[str, Results] = {}

    def run(method: str, progress: Progress) -> Results:
        if method not in measured:
            tuned = results["tuning"][_form(setting)]["settings"] if setting.drafter is not None else {}
            measured.update(_train(options, setting, task, seed, tuned, progress))
        return measured[method]

    methods = ("plain", *options.methods)
    return {f"{setting.name} seed {seed} {method}": partial(run, method) for method in methods}


def _train(
    options: Options, setting: Setting, task: Task, seed: int, tuned: dict[str, int], progress: Progress
) -> dict[str, Results]:
    from specroll.bench.methods import train
    from specroll.bench.methods_stats import cells_of
    from specroll.rivals.settings import FastGRPOConfig

    steps: list[dict[str, Any]] = []

    def on_step(step: dict[str, Any]) -> None:
        steps.append(step)
        rates = {n: s["tokens"] / (s["seconds"] + s["learning"]) for n, s in step["systems"].items()}
        note = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        progress(f"{setting.name} seed {seed}", len(steps), options.steps, f"{note} tokens/s")

    train(
        setting,
        _config(options, setting),
        task,
        options.methods,
        rival=FastGRPOConfig(**tuned),
        epochs=options.epochs,
        seed=seed,
        on_step=on_step,
    )
    return cells_of({name: getattr(setting, name) for name in ("model", "data", "top_p", "batch")}, seed, steps)


def _config(options: Options, setting: Setting) -> TrainConfig:
    return TrainConfig(
        model=setting.model,
        task=setting.data,
        steps=options.steps,
        num_generations=setting.generations,
        prompts_per_step=setting.prompts,
        max_completion=options.tokens,
        top_p=setting.top_p,
        learning_rate=options.learning_rate,
        dtype=options.dtype,
        max_nodes=options.max_nodes,
    )


def _show_tuning(name: str, found: Results) -> None:
    chosen = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
    print(f"fastgrpo, {name}: {chosen}; {found['over_plain']:.2f} times plain decoding", flush=True)


def _show(name: str, cell: Results) -> None:
    """A line for what was measured last."""
    took, share, tokens = cell["generation_s"], cell["generation_share"], cell["tokens_per_round"]
    print(f"{name}: generation {took:.0f} s, {share:.0%} of all; {tokens:.2f} tokens per round", flush=True)
