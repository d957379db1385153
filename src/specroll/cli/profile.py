"""`specroll profile`: where a round's time goes on this device, and what further rows of a pass cost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specroll.cli.common import ModelOptions, check_at_least, check_writable, quiet_loading

if TYPE_CHECKING:
    from specroll.budget import LatencyCurve
    from specroll.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Show the stages of a plain and of a speculative round, the parts of a pass, and the latency surface."""

    heads: Path | None = None
    """Folder of heads that were fitted to the model; without them only plain rounds are shown."""
    task: str = "gsm_symbolic"
    """Where the prompts come from: a task name or a JSON Lines file."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines [SPECROLL_DATA]."""
    running: tuple[int, ...] = (1, 4, 8, 32)
    """Numbers of running sequences to look at."""
    tokens: int = 24
    """New tokens of each sequence."""
    repeats: int = 3
    """Rollouts of each kind, in turn, after one that is not counted."""
    json: Path | None = None
    """Also write the figures here (keys: docs/commands.md)."""

    def __post_init__(self) -> None:
        least = min(self.running, default=0)
        check_at_least(1, tokens=self.tokens, repeats=self.repeats, **{"each of running": least})


def main(options: Options) -> int:
    from specroll.bench.profile import pass_milliseconds
    from specroll.build import encode
    from specroll.cli.progress import Progress
    from specroll.config import EngineConfig
    from specroll.device import machine
    from specroll.engine import Engine
    from specroll.model.load import load_model
    from specroll.propose.proposer import HeadsProposer
    from specroll.propose.store import load_heads
    from specroll.train.data import load_task

    check_writable(options.json)
    with quiet_loading():
        model, tokenizer = load_model(options.model, dtype=options.dtype)
    own_file = options.task.endswith((".jsonl", ".jsonl.gz"))
    task = load_task(options.task, data_dir=options.data_dir, split="train" if own_file else "held_out", size=64)
    prompts = encode(tokenizer, list(task.dataset["prompt"]))
    config = EngineConfig(max_running=max(options.running))
    engines = {"plain": Engine(model, tokenizer, config=config)}
    if options.heads is not None:
        proposer = HeadsProposer(load_heads(options.heads, model), model)
        engines["spec"] = Engine(model, tokenizer, config=config, proposer=proposer)
    with Progress() as progress:
        rounds = _rounds(options, engines, prompts, progress)
        passes = {}
        for done, running in enumerate(options.running, 1):
            passes[str(running)] = pass_milliseconds(engines["plain"], running)
            progress("passes", done, len(options.running))
    curve = _curve(engines)
    _show(rounds, passes, curve)
    if options.json:
        result = {
            "command": "specroll " + " ".join(sys.argv[1:]),
            "machine": machine(model.device, model.dtype),
            "round_ms": rounds,
            "pass_ms": passes,
            "surface_s": dict(zip(map(str, curve.rows), curve.seconds, strict=True)),
            "context_s": asdict(curve.context),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {options.json}")
    return 0


def _rounds(
    options: Options, engines: dict[str, Engine], prompts: list[tuple[int, ...]], progress: Any
) -> dict[str, dict[str, dict[str, float]]]:
    from specroll.bench.profile import rounds_of, stage_milliseconds

    found: dict[str, dict[str, dict[str, float]]] = {}
    total, done = len(options.running) * len(engines) * (options.repeats + 1), 0
    for running in options.running:
        rounds: dict[str, list[Any]] = {name: [] for name in engines}
        for repeat in range(options.repeats + 1):
            for name, engine in engines.items():
                made = rounds_of(engine, prompts, running, options.tokens, repeat * running)
                rounds[name] += made if repeat else []
                done += 1
                progress("rounds", done, total, f"{running} running, {name}")
        found[str(running)] = {name: stage_milliseconds(made) for name, made in rounds.items()}
    return found


def _curve(engines: dict[str, Engine]) -> LatencyCurve:
    """Seconds of a pass and its draws by packed rows and context, as the budget uses them."""
    from specroll.engine.measure import latency_curve
    from specroll.types import SamplingParams

    target = engines["plain"].target
    with target.rolling_out():
        return latency_curve(target, SamplingParams(top_p=0.95))


def _show(
    rounds: dict[str, dict[str, dict[str, float]]], passes: dict[str, dict[str, float]], curve: LatencyCurve
) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = {f"{running} {name}": ms for running, kinds in rounds.items() for name, ms in kinds.items()}
    console = Console()
    console.print(_table(Table, "Milliseconds of a round, by stage", "running sequences", columns))
    console.print(_table(Table, "Milliseconds of a pass with one token per sequence", "running sequences", passes))
    table = Table(title="Latency surface: milliseconds of a pass and its draws, but for reading keys and values")
    table.add_column("rows", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("of one row", justify="right")
    for rows, seconds in zip(curve.rows, curve.seconds, strict=True):
        table.add_row(str(rows), f"{1e3 * seconds:.1f}", f"{seconds / curve.seconds[0]:.2f}")
    console.print(table)
    per_sequence, per_row = 1e6 * curve.context.per_sequence, 1e6 * curve.context.per_row
    print(
        f"A token of context: {per_sequence:.1f} us for each sequence, beyond 128 also {per_row:.1f} us for each row."
    )


def _table(make: Any, title: str, corner: str, columns: dict[str, dict[str, float]]) -> Any:
    table = make(title=title)
    table.add_column(corner)
    for name in columns:
        table.add_column(name, justify="right")
    for row in next(iter(columns.values())):
        table.add_row(row.replace("_", " "), *(f"{values[row]:.2f}" for values in columns.values()))
    return table
