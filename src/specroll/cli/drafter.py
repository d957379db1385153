"""`specroll drafter fit`: pre-train the rival's drafter on the policy's own samples, as `heads fit` teaches heads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from specroll.cli.common import check_at_least, quiet_loading
from specroll.cli.fit import (
    MEASURED_NODES,
    MEASURED_RUNNING,
    FitOptions,
    check_new,
    collect_samples,
    held_out,
    to_sample,
    tokens_per_round,
    write_report,
)


@dataclass(frozen=True, kw_only=True)
class Options(FitOptions):
    """Pre-train FastGRPO's drafter for a model, on responses that it samples itself; no other text is used.

    An interrupted fit goes on with what was sampled when the same command is given again.
    """

    updates: int = 400
    """Steps of the pre-training, 16 responses each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, updates=self.updates)


def main(options: Options) -> int:
    from specroll.rivals.store import WEIGHTS

    check_new(options, WEIGHTS, "a finished drafter")
    from specroll.build import build_engine
    from specroll.cli.progress import Progress
    from specroll.config import EngineConfig
    from specroll.engine import Engine
    from specroll.rivals.eagle import Drafter
    from specroll.rivals.fastgrpo import FastGRPO
    from specroll.rivals.learn import passages_of, pretrain
    from specroll.rivals.settings import FastGRPOConfig
    from specroll.rivals.store import save_drafter

    def measured() -> Engine:
        """With as many nodes as `heads fit` measures heads with, at whatever number of sequences."""
        rows = MEASURED_NODES + 1
        rival = FastGRPO.for_model(causal, drafter, FastGRPOConfig(capacity=MEASURED_RUNNING * rows, most_rows=rows))
        rival.proposer.context.keeps = False
        return Engine(
            causal,
            engine.tokenizer,
            proposer=rival.proposer,
            rule=rival.rule,
            config=EngineConfig(max_running=MEASURED_RUNNING),
        )

    with quiet_loading():
        engine = build_engine(options.model, dtype=options.dtype, max_running=options.max_running)
    causal = engine.target.causal
    requests = to_sample(options, engine)
    apart = held_out(options, engine, requests)
    drafter = Drafter.for_model(causal, seed=options.seed)
    try:
        with Progress() as progress:
            trajectories = collect_samples(options, engine, requests, progress)
            before = tokens_per_round(options, measured(), apart, "untrained drafter", progress)
            taught = pretrain(
                drafter,
                causal,
                passages_of(causal, trajectories, [request.prompt_ids for request in requests]),
                updates=options.updates,
                seed=options.seed,
                on_progress=lambda done, total, told: progress("fitting", done, total, f"hits {told.hits:.2f}"),
            )
            after = tokens_per_round(options, measured(), apart, "fitted drafter", progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what was sampled is in {options.work}; give the same command again to go on"
        ) from None
    assert taught.after is not None
    save_drafter(drafter, options.output, causal)
    report = {
        "tokens_per_round_before": before,
        "tokens_per_round_after": after,
        "nodes": MEASURED_NODES,
        "updates": taught.updates,
        "responses": taught.responses,
        "before": taught.before._asdict(),
        "after": taught.after._asdict(),
        "seconds": taught.seconds,
    }
    write_report(options, engine, trajectories, report)
    shutil.rmtree(options.work)
    print(f"Tokens per round with {MEASURED_NODES} nodes, held-out prompts: {before:.2f} before, {after:.2f} after.")
    print(
        f"The drafter is in {options.output}: give the folder to --drafter of specroll train --method fastgrpo, or to "
        "--drafters of specroll bench methods."
    )
    return 0
