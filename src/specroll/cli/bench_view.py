"""What `specroll bench` shows: a line per cell while it runs, and a table of ratios at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from specroll.bench.quick import Check


def show_cell(name: str, cell: dict[str, Any], pairs: Sequence[str]) -> None:
    rates = "  ".join(f"{system} {r['median']:.0f}" for system, r in cell["tokens_per_second"].items())
    ratios = "  ".join(f"{c} {cell[c]['median']:.2f}" for c in pairs if c in cell)
    print(f"{name:>5}  tokens/s: {rates}   {ratios}", flush=True)


def show_summary(results: dict[str, Any], pairs: Sequence[str]) -> None:
    table = Table(
        title=f"Ratios of tokens per second ({results['machine']['dtype']}), median [least, most] of the repeats"
    )
    table.add_column("sequences", justify="right")
    for column in pairs:
        table.add_column(column.replace("_", " "), justify="right")
    table.add_column("tokens/round", justify="right")
    for name, cell in results["cells"].items():
        ratios = [_spread(cell.get(c)) for c in pairs]
        per_round = cell["tokens_per_round"].get("spec")
        table.add_row(name, *ratios, f"{per_round:.2f}" if per_round else "-")
    Console().print(table)
    if memory := results.get("peak_memory_ratio"):
        print(f"Peak memory over the plain loop's, heads not counted: {memory:.2f}")
    for running, share in results.get("roofline_share", {}).items():
        print(f"Products and one reading of keys and values over a plain round at {running} running: {share:.0%}")


def show_checks(checks: Sequence[Check]) -> None:
    """Every ratio beside what is expected of it: the reference less its tolerance."""
    table = Table(title="Ratios of tokens per second, medians of the repeats")
    for column in ("ratio", "sequences", "reference", "expected at least", "measured", ""):
        table.add_column(column, justify="left" if column in ("ratio", "") else "right")
    for c in checks:
        table.add_row(
            c.pair.replace("_", " "),
            c.cell,
            f"{c.reference:.2f} - {c.tolerance:.0%}",
            f"{c.least:.2f}",
            f"{c.measured:.2f}",
            "holds" if c.holds else "TOO SMALL",
        )
    Console().print(table)


def _spread(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]" if ratio else "-"


def show_adapt(results: dict[str, Any]) -> None:
    """A table of the systems before the shift, and one after it."""
    for part, title in (("ablation", "While GRPO trains"), ("after_shift", "After the shift")):
        if part not in results:
            continue
        table = Table(title=f"{title} ({results['machine']['dtype']}), [95 % intervals]")
        for column in ("system", "tokens/s", "over heads", "over plain", "tokens/round", "accepted", "end to end, s"):
            table.add_column(column, justify="left" if column == "system" else "right")
        for system, found in results[part].items():
            over = [results[key][part].get(system) for key in ("over_heads", "over_plain")]
            table.add_row(
                system,
                _interval(found, "tokens_per_second", 1),
                *(_interval(ratio, "ratio", 3) if ratio else "-" for ratio in over),
                f"{found['tokens_per_round']:.2f}",
                f"{found['acceptance']:.0%}",
                f"{found['end_to_end_s']:.0f}",
            )
        Console().print(table)
        both = ", ".join(f"{_interval(ratio, 'ratio', 3)} over {s}" for s, ratio in results["full_over"][part].items())
        print(f"Both together: {both}")
    print(
        f"Reflex takes {results['reflex_overhead']:.1%} of a round, the slow path {results['slow_overhead']:.1%} of "
        f"the rollouts' time; {results['false_triggers_per_1000_windows']:.1f} false triggers in 1000 windows"
    )


def show_methods(results: dict[str, Any]) -> None:
    """A table of every ratio in every setting, and one line for each over all of them."""
    ratios = {name: found for name, found in results.items() if isinstance(found, dict) and "settings" in found}
    ratios |= {f"suffix_over_plain, epoch {n}": of for n, of in (results.get("suffix_over_plain") or {}).items()}
    table = Table(title=f"While GRPO trains ({results['machine']['dtype']}), [95 % intervals]")
    table.add_column("setting")
    for name in ratios:
        table.add_column(name.replace("_", " "), justify="right")
    for setting in dict.fromkeys(setting for found in ratios.values() for setting in found["settings"]):
        found = [found["settings"].get(setting) for found in ratios.values()]
        table.add_row(setting, *(_interval(of, "ratio", 3) if of else "-" for of in found))
    Console().print(table)
    for name, found in ratios.items():
        print(f"{name.replace('_', ' ')}: {_interval(found, 'mean', 3)} on average, {found['min']:.3f} at the least")


def _interval(found: dict[str, float], name: str, places: int) -> str:
    return f"{found[name]:.{places}f} [{found['low']:.{places}f}, {found['high']:.{places}f}]"
