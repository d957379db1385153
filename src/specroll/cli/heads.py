"""`specroll heads fit`: teach future-token heads the policy's own samples, and measure what they are worth."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specroll.cli.common import ModelOptions, SamplingOptions, check_at_least, check_writable, quiet_loading
from specroll.config import HeadsConfig, HeadsSee

if TYPE_CHECKING:
    from specroll.engine import Engine
    from specroll.propose.heads import FutureHeads
    from specroll.types import Request

MEASURED, MEASURED_NODES = 32, 8
_MEASURED_SHARE = 10  # of small fits: measuring must not take longer than what it measures
_APART = 1 << 50  # keeps the noise of measured responses apart from that of the sampled ones


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SamplingOptions):
    """Fit future-token heads to a model, on responses that it samples itself; no other text is used.

    An interrupted fit goes on when the same command is given again.
    """

    output: Path
    """Folder for the heads."""
    task: str = "gsm_symbolic"
    """Where the prompts come from: a task name, or a JSON Lines file with "question" and "answer"."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines [SPECROLL_DATA]."""
    rollouts: int = 400
    """Responses to sample."""
    group: int = 1
    """Responses per prompt. Heads learn most from as many different prompts as there can be."""
    max_new_tokens: int = 160
    """Most tokens of a response."""
    horizons: int = HeadsConfig().horizons
    """Heads: how many tokens ahead of the root are predicted."""
    sees: HeadsSee = HeadsConfig().sees
    """What a head knows: the whole drafted path before it, the path's root, or the state alone (the published form)."""
    updates: int = 400
    """Steps of the fit, 512 positions each."""
    max_running: int = 32
    """Responses sampled together."""
    json: Path | None = None
    """Also write the report here (keys: docs/commands.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            1,
            rollouts=self.rollouts,
            group=self.group,
            max_new_tokens=self.max_new_tokens,
            horizons=self.horizons,
            updates=self.updates,
            max_running=self.max_running,
        )


def main(options: Options) -> int:
    if options.output.is_file():
        raise NotADirectoryError(f"{options.output} is a file; name a folder for the heads")
    if (options.output / "heads.json").exists():
        raise FileExistsError(f"{options.output} holds finished heads; name another folder, or move this one away")
    check_writable(options.json)
    from specroll.build import build_engine
    from specroll.cli.progress import Progress
    from specroll.device import machine
    from specroll.propose.fit import fit
    from specroll.propose.heads import FutureHeads
    from specroll.propose.samples import draft_vocabulary
    from specroll.propose.store import save_heads

    with quiet_loading():
        engine = build_engine(options.model, dtype=options.dtype, max_running=options.max_running)
    work = options.output / "work"
    requests = _requests(options, engine, "train", options.rollouts)
    measured = _held_out(options, engine, requests)
    try:
        with Progress() as progress:
            trajectories = _collect(options, engine, requests, work, progress)
            causal = engine.target.causal
            config = HeadsConfig(horizons=options.horizons, sees=options.sees)
            vocabulary = draft_vocabulary(trajectories)
            heads = FutureHeads.for_model(causal, config, vocabulary=vocabulary)
            before = _tokens_per_round(options, engine, heads, measured, "untrained heads", progress)
            report = fit(
                heads,
                causal,
                trajectories,
                updates=options.updates,
                seed=options.seed,
                nodes=(2, 4, 8, 16),
                checkpoint=work / "fit.safetensors",
                on_progress=lambda p: progress("fitting", p.update, p.updates, f"loss {p.loss_K[0]:.2f}"),
            )
            after = _tokens_per_round(options, engine, heads, measured, "fitted heads", progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was sampled is in {work}; give the same command again to go on") from None
    save_heads(heads, options.output, causal)
    result = {
        "command": "specroll " + " ".join(sys.argv[1:]),
        "machine": machine(causal.device, causal.dtype),
        "rollouts": len(requests),
        "tokens": sum(t.token_T.numel() for t in trajectories),
        "tokens_per_round_before": before,
        "tokens_per_round_after": after,
        "nodes": MEASURED_NODES,
        **asdict(report),
    }
    for path in {options.output / "report.json", options.json} - {None}:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # type: ignore[union-attr]
    shutil.rmtree(work)
    print(f"Tokens per round with {MEASURED_NODES} nodes, held-out prompts: {before:.2f} before, {after:.2f} after.")
    if report.note:
        print(f"Note: {report.note}")
    print(
        f"The heads are in {options.output}: give the folder to --heads of specroll generate, train or bench rollout."
    )
    return 0


def _collect(options: Options, engine: Engine, requests: list[Request], work: Path, progress: Any) -> list[Any]:
    from specroll.propose.collect import collect
    from specroll.propose.store import Fingerprint
    from specroll.types import Trajectory

    def sample(some: Any) -> list[Trajectory]:
        engine.history.forget()  # a piece depends on none before it, so a fit that was interrupted ends the same
        rollout, trajectories = engine.record(some, options.sampling())
        rates.append(rollout.tokens / rollout.seconds)
        return trajectories

    rates: list[float] = []
    settings: dict[str, object] = {
        "model": options.model,
        "weights": asdict(Fingerprint.of(engine.target.causal)),
        "dtype": str(engine.target.causal.dtype),
        "law": asdict(options.sampling()),
        "task": options.task,
        "rollouts": options.rollouts,
        "group": options.group,
        "max_new_tokens": options.max_new_tokens,
    }
    return collect(
        sample,
        requests,
        work / "samples",
        settings,
        piece=2 * options.max_running,
        on_progress=lambda done, total: progress(
            "sampling", done, total, f"{rates[-1]:.0f} tokens/s" if rates else "from before" if done else ""
        ),
    )


def _requests(options: Options, engine: Engine, split: str, number: int) -> list[Request]:
    from specroll.build import make_requests
    from specroll.train.data import load_task

    size = -(-number // options.group)
    task = load_task(options.task, data_dir=options.data_dir, split=split, size=size, seed=options.seed)  # type: ignore[arg-type]
    prompts = list(task.dataset["prompt"])
    while len(prompts) * options.group < number:  # a small file of questions is gone through again
        prompts += prompts[: size - len(prompts)]
    return make_requests(engine.tokenizer, prompts, samples=options.group, max_new_tokens=options.max_new_tokens)[
        :number
    ]


def _held_out(options: Options, engine: Engine, sampled: list[Request]) -> list[Request]:
    """Requests to measure with, whose responses were not learned from: a tenth of those, `MEASURED` at most."""
    most = min(MEASURED, max(2, len(sampled) // _MEASURED_SHARE))
    if options.task.endswith((".jsonl", ".jsonl.gz")):
        # A file of one's own has no held-out part: its other questions, or else other responses to the same ones.
        every = _requests(options, engine, "train", len(sampled) + options.group * most)
        known = {r.prompt_ids for r in sampled}
        requests = [r for r in every if r.prompt_ids not in known] or every
    else:
        requests = _requests(options, engine, "held_out", most)
    return [replace(r, sample=r.sample + _APART) for r in requests[:most]]


def _tokens_per_round(
    options: Options, engine: Engine, heads: FutureHeads, requests: list[Request], stage: str, progress: Any
) -> float:
    """Measured by the engine, 8 nodes in every round."""
    from specroll.build import build_engine

    measured = build_engine(
        engine.target.causal, engine.tokenizer, heads=heads, fixed_nodes=MEASURED_NODES, max_running=8
    )
    done = count(1)
    progress(stage, 0, len(requests))
    rollout = measured.generate(
        requests,
        options.sampling(),
        on_completion=lambda index, completion: progress(stage, next(done), len(requests)),
    )
    return rollout.tokens_per_round
