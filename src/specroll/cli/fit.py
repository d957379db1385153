"""What `heads fit` and `drafter fit` share: the policy's own samples, and measuring what was fitted to them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specroll.cli.common import ModelOptions, SamplingOptions, check_at_least, check_writable

if TYPE_CHECKING:
    from specroll.cli.progress import Progress
    from specroll.engine import Engine
    from specroll.types import Request, Trajectory

MEASURED, MEASURED_NODES, MEASURED_RUNNING = 32, 8, 8
_MEASURED_SHARE = 10  # of small fits: measuring must not take longer than what it measures
_APART = 1 << 50  # keeps the noise of measured responses apart from that of the sampled ones


@dataclass(frozen=True, kw_only=True)
class FitOptions(ModelOptions, SamplingOptions):
    """What is sampled to learn from."""

    output: Path
    """Folder for what is fitted."""
    task: str = "gsm_symbolic"
    """Where the prompts come from: a task name, or a JSON Lines file with "question" and "answer"."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines [SPECROLL_DATA]."""
    rollouts: int = 400
    """Responses to sample."""
    group: int = 1
    """Responses per prompt. Most is learned from as many different prompts as there can be."""
    max_new_tokens: int = 160
    """Most tokens of a response."""
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
            max_running=self.max_running,
        )

    @property
    def work(self) -> Path:
        """Where what was sampled lies until all is done."""
        return self.output / "work"


def check_new(options: FitOptions, name: str, what: str) -> None:
    """Raise OSError where the output folder cannot be used; `name` is the file of one that is finished."""
    if options.output.is_file():
        raise NotADirectoryError(f"{options.output} is a file; name a folder")
    if (options.output / name).exists():
        raise FileExistsError(f"{options.output} holds {what}; name another folder, or move this one away")
    check_writable(options.json)


def collect_samples(
    options: FitOptions, engine: Engine, requests: Sequence[Request], progress: Progress
) -> list[Trajectory]:
    """The responses to `requests`, of which an interrupted command's are read again."""
    from specroll.propose.collect import collect
    from specroll.propose.store import Fingerprint

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
        options.work / "samples",
        settings,
        piece=2 * options.max_running,
        on_progress=lambda done, total: progress(
            "sampling", done, total, f"{rates[-1]:.0f} tokens/s" if rates else "from before" if done else ""
        ),
    )


def to_sample(options: FitOptions, engine: Engine) -> list[Request]:
    return _requests(options, engine, "train", options.rollouts)


def _requests(options: FitOptions, engine: Engine, split: str, number: int) -> list[Request]:
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


def held_out(options: FitOptions, engine: Engine, sampled: Sequence[Request]) -> list[Request]:
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


def tokens_per_round(
    options: FitOptions, engine: Engine, requests: Sequence[Request], stage: str, progress: Progress
) -> float:
    """Of an engine that proposes."""
    done = count(1)
    progress(stage, 0, len(requests))
    rollout = engine.generate(
        requests,
        options.sampling(),
        on_completion=lambda index, completion: progress(stage, next(done), len(requests)),
    )
    return rollout.tokens_per_round


def write_report(
    options: FitOptions, engine: Engine, trajectories: Sequence[Trajectory], report: dict[str, Any]
) -> None:
    """Into the output folder, and where the options say."""
    from specroll.device import machine

    causal = engine.target.causal
    result = {
        "command": "specroll " + " ".join(sys.argv[1:]),
        "machine": machine(causal.device, causal.dtype),
        "rollouts": len(trajectories),
        "tokens": sum(t.token_T.numel() for t in trajectories),
        **report,
    }
    for path in {options.output / "report.json", options.json} - {None}:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # type: ignore[union-attr]
