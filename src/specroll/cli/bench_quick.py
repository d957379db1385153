"""`specroll bench --quick`: whether speeds stand to each other as they should, by ratios, never by times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specroll.cli.common import ModelOptions, refuse_existing
from specroll.cli.measure import Results, WorkOptions, finish, head, load_work, measure, medians

# Small, so that all of it takes under three minutes at 6 tokens per second of the slowest system.
_TOKENS, _REPEATS = 20, 3


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Measure a few ratios of speeds and hold them against the package's references, in under three minutes.

    The exit code is 1 where a ratio is below its reference less the tolerance, and 0 where none is or where there is
    no reference for this kind of device, precision and model.
    """

    heads: Path | None = None
    """Folder of heads that were fitted to the model: also measure what speculation gains."""
    json: Path | None = None
    """Write the results here (keys: docs/commands.md)."""


def main(options: Options) -> int:
    refuse_existing(options.json, "results")
    results = _measured(options)
    failed = _compare(results)
    finish(_work_options(options, options.json), results)
    return 1 if failed else 0


def _work_options(options: Options, json: Path | None = None) -> WorkOptions:
    from specroll.bench.quick import PAIRS

    return WorkOptions(
        model=options.model,
        dtype=options.dtype,
        heads=options.heads,
        running=tuple(int(cell) for cell in PAIRS if "x" not in cell),
        batches=tuple(cell for cell in PAIRS if "x" in cell and options.heads),
        tokens=_TOKENS,
        repeats=_REPEATS,
        json=json,
    )


def _measured(options: Options) -> Results:
    from specroll.bench.quick import PAIRS, subject, systems

    pairs = list(dict.fromkeys(pair for of_cell in PAIRS.values() for pair in of_cell))
    settings = _work_options(options)  # without a file: what takes so little begins anew after an interruption
    work = load_work(settings)
    results = head(work) | {"subject": subject(work.bench.model)}
    for cell in work.cells:
        measure(
            settings,
            replace(work, cells=[cell]),
            work.systems(systems(cell.name)),
            pairs,
            results,
            sum_up=lambda cells, pairs: {"ratios": medians(cells, pairs)},
        )
    return results


def _compare(results: Results) -> bool:
    """Show every ratio beside what is expected of it; whether one is too small. `results` names those as "failed"."""
    from specroll.bench.quick import checks, references
    from specroll.cli.bench_view import show_checks

    known, subject = references(), results["subject"]
    results["failed"] = None
    if subject not in known:
        print(f"There is nothing to compare with: no references for {subject}, only for {', '.join(known)}.")
        return False
    found = checks(results["ratios"], known[subject])
    failed = results["failed"] = [f"{check.pair} {check.cell}" for check in found if not check.holds]
    show_checks(found)
    if failed:
        print(
            f"{len(failed)} of {len(found)} ratios are below what is expected for {subject}: {', '.join(failed)}. "
            "Measure again where something else was running."
        )
    else:
        print(f"All {len(found)} ratios are as expected for {subject}.")
    return bool(failed)
