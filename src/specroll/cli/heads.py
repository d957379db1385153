"""`specroll heads fit`: teach future-token heads the policy's own samples, and measure what they are worth."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass

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
from specroll.config import HeadsConfig, HeadsSee


@dataclass(frozen=True, kw_only=True)
class Options(FitOptions):
    """Fit future-token heads to a model, on responses that it samples itself; no other text is used.

    An interrupted fit goes on when the same command is given again.
    """

    horizons: int = HeadsConfig().horizons
    """Heads: how many tokens ahead of the root are predicted."""
    sees: HeadsSee = HeadsConfig().sees
    """What a head knows: the whole drafted path before it, the path's root, or the state alone (the published form)."""
    updates: int = 400
    """Steps of the fit, 512 positions each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, horizons=self.horizons, updates=self.updates)


def main(options: Options) -> int:
    check_new(options, "heads.json", "finished heads")
    from specroll.build import build_engine
    from specroll.cli.progress import Progress
    from specroll.engine import Engine
    from specroll.propose.fit import fit
    from specroll.propose.heads import FutureHeads
    from specroll.propose.samples import draft_vocabulary
    from specroll.propose.store import save_heads

    def measured(heads: FutureHeads) -> Engine:
        return build_engine(
            causal, engine.tokenizer, heads=heads, fixed_nodes=MEASURED_NODES, max_running=MEASURED_RUNNING
        )

    with quiet_loading():
        engine = build_engine(options.model, dtype=options.dtype, max_running=options.max_running)
    causal = engine.target.causal
    requests = to_sample(options, engine)
    apart = held_out(options, engine, requests)
    try:
        with Progress() as progress:
            trajectories = collect_samples(options, engine, requests, progress)
            config = HeadsConfig(horizons=options.horizons, sees=options.sees)
            heads = FutureHeads.for_model(causal, config, vocabulary=draft_vocabulary(trajectories))
            before = tokens_per_round(options, measured(heads), apart, "untrained heads", progress)
            report = fit(
                heads,
                causal,
                trajectories,
                updates=options.updates,
                seed=options.seed,
                nodes=(2, 4, 8, 16),
                checkpoint=options.work / "fit.safetensors",
                on_progress=lambda p: progress("fitting", p.update, p.updates, f"loss {p.loss_K[0]:.2f}"),
            )
            after = tokens_per_round(options, measured(heads), apart, "fitted heads", progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what was sampled is in {options.work}; give the same command again to go on"
        ) from None
    save_heads(heads, options.output, causal)
    worth = {"tokens_per_round_before": before, "tokens_per_round_after": after, "nodes": MEASURED_NODES}
    write_report(options, engine, trajectories, worth | asdict(report))
    shutil.rmtree(options.work)
    print(f"Tokens per round with {MEASURED_NODES} nodes, held-out prompts: {before:.2f} before, {after:.2f} after.")
    if report.note:
        print(f"Note: {report.note}")
    print(
        f"The heads are in {options.output}: give the folder to --heads of specroll generate, train or bench rollout."
    )
    return 0
