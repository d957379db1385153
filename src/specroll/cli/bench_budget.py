"""`specroll bench budget`: what choosing the nodes by their worth gains over the paper's rule, and what it can lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specroll.cli.measure import Results, WorkOptions, finish, head, load_work, measure, medians

PAIRS = (
    "optimal_over_paper",
    "optimal_over_plain",
    "paper_over_plain",
    "random_over_plain",
    "hostile_over_plain",
    "control_over_plain",
)


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    """Time plain decoding, the optimal budget and the paper's rule on the same work, interleaved, with the given heads;
    and the optimal budget with random heads and with a hostile proposer, which must not lose to plain decoding. The
    control is plain decoding once more: what its ratio is off by is the machine's unrest.
    """

    running: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Numbers of running sequences; each decodes a fixed number of tokens, but for a single one, which may end."""
    batches: tuple[str, ...] = ("1x4", "1x8", "8x8")
    """Whole batches, PROMPTSxRESPONSES, that run down to the last row."""
    systems: tuple[str, ...] = ("plain", "control", "optimal", "paper", "random", "hostile")
    """Which systems to time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is None:
            raise ValueError("give --heads (specroll heads fit): budgets are compared on heads that know something")


def main(options: Options) -> int:
    from specroll.bench.budget import engines
    from specroll.cli.bench_view import show_summary

    work = load_work(options)
    assert work.heads is not None
    bench = work.bench
    most = max(cell.rows for cell in work.cells)
    bench.engines = engines(bench.model, bench.tokenizer, work.heads, max_nodes=options.max_nodes, max_running=most)
    results = head(work)
    measure(options, work, options.systems, PAIRS, results, sum_up=sum_up)
    show_summary(results, PAIRS)
    if worst := results["worst_over_plain"]:
        print(f"The optimal budget's least ratio to plain decoding: {worst['ratio']:.2f} ({worst['case']})")
    if by_rounds_worst := results["worst_by_rounds"]:
        print(f"The least by rounds: {by_rounds_worst['ratio']:.3f} ({by_rounds_worst['case']})")
    if control := results["control_worst"]:
        print(f"Plain decoding's least ratio to itself: {control['ratio']:.2f} ({control['case']})")
    finish(options, results)
    return 0


def sum_up(cells: Results, pairs: Sequence[str]) -> Results:
    """The documented keys: medians of ratios by cell, batches and running sequences alike, and the worst of them."""
    from specroll.bench.budget import worst_by_rounds, worst_over_plain

    return medians(cells, pairs) | {
        "worst_over_plain": worst_over_plain(cells),
        "worst_by_rounds": worst_by_rounds(cells),
        "control_worst": worst_over_plain(cells, ("control",)),
    }
