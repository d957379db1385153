"""What `specroll simulate` shows and writes: a table per device and model, validations, a picture, a JSON record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specroll.simulate import Outcome, Prediction, Trace
    from specroll.simulate.predict import Validation

COLUMNS = ("running", "plain", "planner", "gain", "per round", "nodes", "paper", "best fixed")


def show(name: str, predictions: Sequence[Prediction]) -> None:
    from rich.console import Console

    from specroll.report.live import summary_table

    rows = [
        (
            p.running,
            p.plain.tokens_per_second,
            p.planner.tokens_per_second,
            f"{p.over_plain(p.planner):.2f}",
            f"{p.planner.tokens_per_round:.2f}",
            f"{p.planner.nodes_per_turn:.1f}",
            f"{p.over_plain(p.paper):.2f}",
            f"{p.best_fixed}: {p.over_plain(p.fixed[p.best_fixed]):.2f}",
        )
        for p in predictions
    ]
    Console().print(summary_table(rows, columns=COLUMNS, title=f"Predicted tokens/s: {name}"))
    for p in predictions:
        if p.doubt:
            print(f"{p.running} running: {p.doubt}. The figures are as if it did fit.")
            break  # more sequences need more


def show_validations(validations: Sequence[Validation]) -> None:
    from rich.console import Console

    from specroll.report.live import summary_table

    if not validations:
        return
    rows = [
        (
            v.measured.running,
            *(f"{v.ratio(system):.2f}" for system in v.predicted),
            *(f"{gain:.2f}" for gain in v.gains),
            *(f"{of:.2f}" for of in (v.predicted["planner"].tokens_per_round, v.measured.tokens_per_round["planner"])),
        )
        for v in validations
    ]
    columns = ("running", "plain", "planner", "gain", "measured", "per round", "measured")
    Console().print(summary_table(rows, columns=columns, title="Predicted over measured tokens/s"))


def draw(path: Path, found: Mapping[str, Sequence[Prediction]]) -> None:
    """The planner's gain over plain decoding by running sequences, a line per device and model."""
    from specroll.report.picture import draw_lines

    draw_lines(
        path,
        {name: [(p.running, p.over_plain(p.planner)) for p in predictions] for name, predictions in found.items()},
        x_label="running sequences",
        y_label="predicted tokens/s over plain decoding",
    )


def as_record(
    trace: Trace, found: Mapping[str, Sequence[Prediction]], validations: Sequence[Validation]
) -> dict[str, Any]:
    """The predictions for a JSON file; keys in docs/commands.md."""
    return {
        "trace": trace.made,
        "surfaces": {name: {str(p.running): _prediction(p) for p in ps} for name, ps in found.items()},
        "validation": {
            str(v.measured.running): {
                "gain_predicted": v.gains[0],
                "gain_measured": v.gains[1],
            }
            | {
                system: {
                    "predicted": outcome.tokens_per_second,
                    "measured": v.measured.tokens_per_second[system],
                    "predicted_over_measured": v.ratio(system),
                    "predicted_tokens_per_round": outcome.tokens_per_round,
                    "measured_tokens_per_round": v.measured.tokens_per_round[system],
                }
                for system, outcome in v.predicted.items()
            }
            for v in validations
        },
    }


def _prediction(p: Prediction) -> dict[str, Any]:
    def outcome(of: Outcome) -> dict[str, float]:
        return {
            "tokens_per_second": of.tokens_per_second,
            "over_plain": p.over_plain(of),
            "tokens_per_round": of.tokens_per_round,
            "nodes_per_row": of.nodes_per_turn,
        }

    return {
        "responses": p.responses,
        "planner": outcome(p.planner),
        "paper": outcome(p.paper),
        "fixed": {str(nodes): outcome(of) for nodes, of in p.fixed.items()},
        "best_fixed": p.best_fixed,
        "doubt": p.doubt,
    }
