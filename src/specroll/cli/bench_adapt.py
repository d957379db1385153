"""`specroll bench adapt`: what Reflex and the slow path are worth while the policy moves, measured in real training."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specroll.cli.bench_adapt_still import PROMPTS, Still, cold_start, false_triggers, reflex
from specroll.cli.common import check_at_least, check_writable, quiet_loading
from specroll.cli.measure import Results, TimingOptions, finish, go_through, head_of
from specroll.config import SlowConfig, TrainConfig

if TYPE_CHECKING:
    from specroll.bench.adapt import Experiment
    from specroll.cli.progress import Progress

_SEED = "seed "


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """Train with GRPO while every step is sampled five times, interleaved: by plain decoding, and by heads with Reflex
    and the slow path, with either and with neither. All sample the same tokens, so one training serves all.

    With --shift-to the policy goes on with other weights from --shift-step on: what a change costs, and wins back.
    """

    task: str = "gsm8k"
    """Where the prompts come from: a task name or a JSON Lines file."""
    repeats: int = 4
    """Rollouts that Reflex's own cost is measured on, after one that is not counted."""
    steps: int = 60
    """Optimizer steps of a training."""
    seeds: int = 2
    """Trainings: seeds 0, 1, .., each with other prompts and other draws."""
    prompts: int = 4
    """Prompts per step."""
    generations: int = 4
    """Responses per prompt."""
    running: int = 8
    """Responses that are decoded together; the others of a step wait for a slot."""
    tokens: int = 96
    """Most tokens of a response."""
    learning_rate: float = TrainConfig.learning_rate
    """Of the policy's adapter, constant over the run."""
    slow_share: float = SlowConfig().slow_share
    """Most of the rollouts' time that the slow path may take; a short run needs more than a long one."""
    shift_to: str | None = None
    """A model of the same architecture, whose weights the policy takes over in the middle of each training."""
    shift_step: int | None = None
    """The first step with them, counted from 0 [half of the steps]."""
    shift_task: str | None = None
    """Where the prompts come from with them [the same task]."""
    output: Path | None = None
    """Folder for the steps' records, one JSON line each as it ends; seeds that are whole there are not run again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            1,
            steps=self.steps,
            seeds=self.seeds,
            prompts=self.prompts,
            running=self.running,
            tokens=self.tokens,
            max_nodes=self.max_nodes,
        )
        check_at_least(2, generations=self.generations)
        if self.heads is None:
            raise ValueError("give --heads (specroll heads fit): what keeps heads good is measured on good ones")
        if self.dtype == "float16":
            raise ValueError("dtype float16 cannot be trained: use auto, bfloat16 or float32")
        if self.shift_to is None and (self.shift_step, self.shift_task) != (None, None):
            raise ValueError("shift-step and shift-task say when and what beside --shift-to: give that as well")
        if self.shift_to is not None and not 0 < self.first_shifted < self.steps:
            raise ValueError(
                f"shift-step must leave steps before and after it, 1 to {self.steps - 1} of {self.steps}, got "
                f"{self.first_shifted}"
            )
        SlowConfig(slow_share=self.slow_share)
        self.training()

    @property
    def first_shifted(self) -> int:
        return self.steps // 2 if self.shift_step is None else self.shift_step

    def training(self) -> TrainConfig:
        """The training that is measured. Raises ValueError for what it cannot be."""
        assert self.heads is not None and self.dtype != "float16"
        return TrainConfig(
            model=self.model,
            task=self.task,
            data_dir=self.data_dir,
            steps=self.steps,
            num_generations=self.generations,
            prompts_per_step=self.prompts,
            max_completion=self.tokens,
            learning_rate=self.learning_rate,
            dtype=self.dtype,
            heads=str(self.heads),
            max_nodes=self.max_nodes,
            slow_share=self.slow_share,
        )


def main(options: Options) -> int:
    # A measurement is made of local files; nobody is told of it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from specroll.cli.bench_view import show_adapt
    from specroll.train.quiet import quiet

    check_writable(options.json)
    with quiet():
        still, experiment = _load(options)
        results: Results = head_of(still.model) | {"steps": options.steps, "seeds": options.seeds}
        results["settings"] = _settings(options)
        cells: dict[str, Callable[[Progress], Results]] = {
            "reflex": partial(reflex, options, still),
            "still": partial(false_triggers, options, still),
            "cold": partial(cold_start, options, still),
        }
        for seed in range(options.seeds):
            cells[f"{_SEED}{seed}"] = partial(_train, options, experiment, seed, results["machine"])
        go_through(options.json, results, cells, sum_up, _show)
    show_adapt(results)
    finish(options, results)
    return 0


def sum_up(cells: Results) -> Results:
    """The documented keys, as far as they are measured."""
    from specroll.bench.adapt_stats import figures

    found: Results = {}
    if "reflex" in cells:
        found["reflex_overhead"] = cells["reflex"]["share"]
    if "still" in cells:
        found["false_triggers_per_1000_windows"] = cells["still"]["per_1000"]
    if "cold" in cells:
        found["cold_start"] = cells["cold"]
    seeds = [cell["steps"] for name, cell in cells.items() if name.startswith(_SEED)]
    return found | figures(seeds) if seeds else found


def _load(options: Options) -> tuple[Still, Experiment]:
    """What the options name. Raises ValueError or OSError."""
    from specroll.bench.adapt import Experiment, Shift
    from specroll.build import encode
    from specroll.model.load import load_model
    from specroll.propose.store import load_heads
    from specroll.train.data import load_task
    from specroll.train.shift import check_alike

    assert options.heads is not None
    with quiet_loading():
        model, tokenizer = load_model(options.model, dtype=options.dtype)
    heads = load_heads(options.heads, model)
    if not heads.trained:
        raise ValueError(f"the heads in {options.heads} have learned nothing yet: specroll heads fit")
    task = load_task(options.task, data_dir=options.data_dir)
    shift = None
    if options.shift_to is not None:
        with quiet_loading():
            other, others_tokenizer = load_model(options.shift_to, dtype=options.dtype)
        check_alike(model, other)
        if tokenizer.get_vocab() != others_tokenizer.get_vocab():
            raise ValueError(f"the tokenizer of {options.shift_to} is another one: its tokens would mean other texts")
        later = task if options.shift_task is None else load_task(options.shift_task, data_dir=options.data_dir)
        shift = Shift(options.first_shifted, other, later)
    prompts = encode(tokenizer, list(task.dataset["prompt"][: PROMPTS + 4 * options.prompts]))
    experiment = Experiment(config=options.training(), task=task, running=options.running, shift=shift)
    return Still(model, tokenizer, heads, prompts), experiment


def _settings(options: Options) -> Results:
    """What the command says only by leaving it out."""
    names = ("task", "prompts", "generations", "running", "tokens", "learning_rate", "slow_share", "max_nodes")
    shift = {"to": options.shift_to, "step": options.first_shifted, "task": options.shift_task or options.task}
    return {name: getattr(options, name) for name in names} | {"shift": shift if options.shift_to else None}


def _train(options: Options, experiment: Experiment, seed: int, machine: Results, progress: Progress) -> Results:
    """The steps of one training, from the output folder where they are all there."""
    from specroll.bench.adapt import train
    from specroll.report.records import RunFolder

    folder = None if options.output is None else RunFolder(options.output / f"seed-{seed}")
    asked = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}
    left = {name: asked.pop(name) for name in ("json", "output", "seeds", "repeats")}  # of no matter to a training
    kept = None if folder is None else _kept(folder, asked | {"machine": machine, "seed": seed}, options.steps)
    if kept is not None:
        progress.say(f"{left['output']}: seed {seed} was measured before")
        return {"steps": kept}
    steps: list[Results] = []

    def on_step(step: Results) -> None:
        steps.append(step)
        if folder is not None:
            folder.add_metrics(step["step"], step)
        rates = {n: s["tokens"] / (s["seconds"] + s["learning"]) for n, s in step["systems"].items()}
        note = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        progress(f"{_SEED}{seed}", len(steps), options.steps, f"{note} tokens/s")

    train(experiment, seed, on_step)
    return {"steps": steps}


def _kept(folder: Any, asked: Results, steps: int) -> list[Results] | None:
    """All steps of an earlier run that was asked for the same; None, and an empty folder, where it was cut short."""
    if folder.config_path.exists():
        if folder.config() != asked:
            raise FileExistsError(
                f"{folder.path} holds the steps of another measurement; name another --output, or move it away"
            )
        records = folder.metrics() if folder.metrics_path.exists() else []
        if len(records) == steps:
            return records
        folder.metrics_path.unlink(missing_ok=True)
    folder.start(asked)
    return None


def _show(name: str, cell: Results) -> None:
    """A line for what was measured last."""
    if name == "reflex":
        print(
            f"Reflex takes {cell['share']:.1%} of a round of {cell['running']} sequences: "
            f"{1e3 * cell['cost_s']:.2f} of {1e3 * cell['round_s']:.0f} ms",
            flush=True,
        )
    elif name == "still":
        print(f"A still policy: {cell['triggers']} triggers in {cell['windows']} windows", flush=True)
    elif name == "cold":
        last = cell["lessons"][-1]
        print(
            f"Untrained heads after {last['responses']} responses: {last['tokens_per_round']:.2f} tokens per round, "
            f"fitted ones {cell['fitted']:.2f}",
            flush=True,
        )
    else:
        rewards = [step["reward"] for step in cell["steps"]]
        first, last = (sum(some) / len(some) for some in (rewards[:8], rewards[-8:]))
        print(f"{name}: {len(rewards)} steps, reward {first:.2f} in the first 8, {last:.2f} in the last 8", flush=True)
