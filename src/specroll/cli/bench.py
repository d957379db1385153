"""`specroll bench rollout`: how fast, against what a user has today, by ratios measured in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specroll.cli.common import check_at_least
from specroll.cli.measure import Work, WorkOptions, finish, head, load_work, measure
from specroll.config import BudgetConfig, BudgetRuleName

PAIRS = (
    "plain_over_hf",
    "spec_over_plain",
    "spec_over_hf",
    "spec_over_lean",
    "lean_over_plain",
    "hidden_over_lean",
    "untrained_over_plain",
)


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    """Time transformers' generate, our plain loop and our speculative engine on the same work, interleaved.

    Without --heads only untrained heads are measured (they must cost nothing); `specroll heads fit` makes fitted ones.
    """

    systems: tuple[str, ...] = ("hf", "plain", "spec", "lean", "hidden", "untrained")
    """Which systems to time: lean is without Reflex, hidden with its published form."""
    budget: BudgetRuleName = BudgetConfig().rule
    """optimal verifies as many nodes as pay in each round; paper is the published rule, a baseline."""
    nodes: int | None = None
    """So many nodes of each sequence in every round, whether they pay or not [the budget decides]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes is not None:
            check_at_least(1, nodes=self.nodes)


def main(options: Options) -> int:
    from specroll.cli.bench_view import show_summary

    work = load_work(options)
    for engine in work.bench.engines.values():
        engine.budget = replace(engine.budget, rule=options.budget, fixed_nodes=options.nodes)
    results = head(work)
    systems = work.systems(options.systems)
    if not systems:
        raise ValueError("the system spec needs --heads")
    measure(options, work, systems, PAIRS, results)
    if work.heads is not None:
        results["peak_memory"] = _peak_memory(options, work)
        results["peak_memory_ratio"] = results["peak_memory"]["ratio"]
    show_summary(results, PAIRS)
    finish(options, results)
    return 0


def _peak_memory(options: Options, work: Work) -> dict[str, float]:
    """Peak memory with speculation, less the heads, over the plain loop's: 8 x 8, 8 nodes in every round."""
    import torch

    from specroll.bench.memory import peak_bytes

    assert work.heads is not None
    settings = {
        "model": options.model,
        "heads": None,
        "dtype": str(work.bench.model.dtype).removeprefix("torch."),
        "nodes": 8,
        "prompts": work.prompts[:8],
        "group": 8,
        "tokens": options.tokens,
        "threads": torch.get_num_threads(),
    }
    plain = peak_bytes(settings)
    spec = peak_bytes(settings | {"heads": str(options.heads)})
    own = sum(p.numel() * p.element_size() for p in work.heads.parameters())
    return {"plain_bytes": plain, "spec_bytes": spec, "heads_bytes": own, "ratio": (spec - own) / plain}
