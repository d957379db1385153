"""`specroll simulate record`: what a proposer offers and what of it is drawn, written down for any other budget."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specroll.cli.common import ModelOptions, SamplingOptions, check_at_least, quiet_loading, refuse_existing

if TYPE_CHECKING:
    from specroll.engine import Engine
    from specroll.types import Request

_PER_SLOT = 4  # responses that are timed for each slot: enough that slots are refilled


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SamplingOptions):
    """Sample responses, ask the heads behind every token, and time plain and speculative rollouts.

    The trace holds all that `specroll simulate` needs: ranked proposals with the drawn ones among them, this machine's
    latency curve, and the measured rates that its predictions are held against.
    """

    output: Path
    """The trace file."""
    heads: Path | None = None
    """Folder of heads fitted to the model [untrained heads]."""
    task: str = "gsm_symbolic"
    """Where the prompts come from: a task name or a JSON Lines file."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines [SPECROLL_DATA]."""
    prompts: int = 8
    """Prompts to answer."""
    group: int = 4
    """Responses per prompt."""
    max_new_tokens: int = 128
    """Most tokens of a response."""
    nodes: int = 16
    """Most nodes behind a token: no larger tree can be replayed."""
    running: tuple[int, ...] = (1, 4, 8)
    """Numbers of slots to time, each on four responses per slot (or all there are)."""
    repeats: int = 3
    """Timed rollouts of each system and number of slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            1,
            prompts=self.prompts,
            group=self.group,
            max_new_tokens=self.max_new_tokens,
            nodes=self.nodes,
            repeats=self.repeats,
            **{"each of running": min(self.running, default=0)},
        )


def main(options: Options) -> int:
    refuse_existing(options.output, "trace")
    from specroll.cli.progress import Progress
    from specroll.device import machine
    from specroll.simulate.record import record
    from specroll.simulate.timing import Prices, measured_surface, time_rollouts
    from specroll.simulate.trace import Trace, write_trace

    engine, horizons, draft_vocabulary = _engine(options)
    requests, sampling = _requests(options, engine), options.sampling()
    measured = []
    with Progress() as progress:
        responses = record(engine, requests, sampling, options.nodes, progress)
        progress("measuring prices", 0, 1)
        prices = Prices.measure(engine, sampling)
        progress("measuring prices", 1, 1)
        for running in dict.fromkeys(options.running):
            timed = requests[: _PER_SLOT * running]
            stage = f"timing {running} running"
            progress(stage, 0, options.repeats)
            measured.append(
                time_rollouts(
                    engine,
                    timed,
                    sampling,
                    prices.curve,
                    running,
                    options.repeats,
                    lambda done, stage=stage: progress(stage, done, options.repeats),
                )
            )
    made_on = machine(engine.target.device, engine.target.causal.dtype)
    trace = Trace(
        nodes=options.nodes,
        horizons=horizons,
        draft_vocabulary=draft_vocabulary,
        responses=tuple(responses),
        surface=measured_surface(engine, prices, measured, f"{made_on['processor']} {made_on['device']}"),
        measured=tuple(measured),
        made={"command": "specroll " + " ".join(sys.argv[1:]), "machine": made_on, "law": asdict(sampling)},
    )
    write_trace(options.output, trace)
    tokens = sum(response.tokens for response in responses)
    print(f"{len(responses)} responses, {tokens} tokens. The trace is in {options.output}.")
    print(f"specroll simulate --trace {options.output} says what it would be worth elsewhere.")
    return 0


def _engine(options: Options) -> tuple[Engine, int, int]:
    """The engine with its proposer, the heads' horizons, and how many tokens they propose among."""
    from specroll.build import build_engine
    from specroll.propose.heads import FutureHeads
    from specroll.propose.proposer import HeadsProposer
    from specroll.propose.store import load_heads

    with quiet_loading():
        engine = build_engine(options.model, dtype=options.dtype, max_nodes=options.nodes)
    causal = engine.target.causal
    heads = load_heads(options.heads, causal) if options.heads else FutureHeads.for_model(causal)
    engine.proposer = HeadsProposer(heads, causal, ranking=engine.budget.ranking, reflex=engine.budget.reflex)
    vocabulary_V = heads.vocabulary_V
    return engine, heads.horizons, heads.vocab_size if vocabulary_V is None else vocabulary_V.numel()


def _requests(options: Options, engine: Engine) -> list[Request]:
    from specroll.build import make_requests
    from specroll.train.data import load_task

    own_file = options.task.endswith((".jsonl", ".jsonl.gz"))  # it has no held-out part, and nothing is learned here
    task = load_task(
        options.task,
        data_dir=options.data_dir,
        split="train" if own_file else "held_out",
        size=options.prompts,
        seed=options.seed,
    )
    prompts = list(task.dataset["prompt"])[: options.prompts]
    return make_requests(engine.tokenizer, prompts, samples=options.group, max_new_tokens=options.max_new_tokens)
