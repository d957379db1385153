"""What the commands that time systems share: the work, the loop over its cells, and going on after an interruption."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specroll.cli.common import ModelOptions, check_at_least, check_writable, quiet_loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specroll.bench.rollout import Bench, Cell
    from specroll.build import Message
    from specroll.cli.progress import Progress
    from specroll.propose.heads import FutureHeads

Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TimingOptions(ModelOptions):
    """What is timed: a model, perhaps with heads, on the prompts of a task."""

    heads: Path | None = None
    """Folder of heads that were fitted to the model."""
    task: str = "gsm_symbolic"
    """Where the prompts come from: a task name or a JSON Lines file."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines (also SPECROLL_DATA)."""
    repeats: int = 5
    """Counted repeats of every cell, after one that is not."""
    max_nodes: int = 16
    """Most tree nodes per sequence."""
    json: Path | None = None
    """Write the results here (keys: docs/commands.md); the same command goes on from there after an interruption."""

    def __post_init__(self) -> None:
        check_at_least(1, repeats=self.repeats)
        check_at_least(0, max_nodes=self.max_nodes)


@dataclass(frozen=True, kw_only=True)
class WorkOptions(TimingOptions):
    """The work that systems are timed on."""

    running: tuple[int, ...] = (1, 4, 8, 32, 64)
    """Numbers of running sequences; each decodes a fixed number of tokens, but for a single one, which may end."""
    batches: tuple[str, ...] = ("1x4", "2x8", "8x8")
    """Whole batches, PROMPTSxRESPONSES, that run down to the last row."""
    systems: tuple[str, ...] = ("hf", "plain", "spec")
    """Which systems to time."""
    tokens: int = 72
    """New tokens of a running cell (a third of it from 32 sequences up), and twice that at most in a batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, tokens=self.tokens, **{"each of running": min(self.running, default=1)})
        if bad := [b for b in self.batches if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", b)]:
            raise ValueError(f"a batch is PROMPTSxRESPONSES, such as 8x8; got {bad[0]!r}")
        if not self.running and not self.batches:
            raise ValueError("nothing to measure: give --running or --batches")
        known = type(self).systems
        unknown = [s for s in self.systems if s not in known]
        if unknown or not self.systems:
            raise ValueError(f"systems are {', '.join(known)}; got {', '.join(unknown) or 'none'}")


@dataclass(frozen=True, slots=True)
class Work:
    """The options' cells and prompts, and the systems of this process around one model."""

    cells: list[Cell]
    prompts: list[tuple[int, ...]]
    bench: Bench
    heads: FutureHeads | None

    def systems(self, wanted: Sequence[str]) -> list[str]:
        """Those of `wanted` that are there: speculation needs heads, a peer has to be running."""
        return [name for name in wanted if name in self.bench.systems]


class Loaded(NamedTuple):
    """What the options name, ready to be run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: FutureHeads | None
    prompts: list[list[Message]]


def load(options: TimingOptions) -> Loaded:
    """Load what the options name. Raises ValueError or OSError."""
    from specroll.model.load import load_model
    from specroll.propose.store import load_heads
    from specroll.train.data import load_task

    check_writable(options.json)
    with quiet_loading():
        model, tokenizer = load_model(options.model, dtype=options.dtype)
    heads = load_heads(options.heads, model) if options.heads else None
    own_file = options.task.endswith((".jsonl", ".jsonl.gz"))  # it has no held-out part, and nothing is learned here
    task = load_task(options.task, data_dir=options.data_dir, split="train" if own_file else "held_out", size=64)
    return Loaded(model, tokenizer, heads, list(task.dataset["prompt"]))


def load_work(options: WorkOptions) -> Work:
    """The cells that the options ask for, around what they name. Raises ValueError or OSError."""
    from specroll.bench.rollout import Bench, batch_cell, running_cell
    from specroll.build import encode

    cells = [running_cell(r, options.tokens if r < 32 else max(1, options.tokens // 3)) for r in options.running]
    cells += [batch_cell(b, 2 * options.tokens) for b in options.batches]
    model, tokenizer, heads, prompts = load(options)
    return Work(cells, encode(tokenizer, prompts), Bench(model, tokenizer, heads, options.max_nodes), heads)


def head(work: Work) -> Results:
    return head_of(work.bench.model)


def head_of(model: PreTrainedModel) -> Results:
    """What the figures hold for: a measurement goes on only where all of this is the same."""
    import sys

    from specroll.device import machine

    command = "specroll " + " ".join(sys.argv[1:])
    return {"command": command, "machine": machine(model.device, model.dtype), "complete": False, "cells": {}}


def summary(cells: Results, pairs: Sequence[str]) -> Results:
    """The documented keys: medians of ratios by running sequences, and the same by batch."""
    found: Results = medians({n: c for n, c in cells.items() if "x" not in n}, pairs)
    found["batch"] = medians({n: c for n, c in cells.items() if "x" in n}, pairs)
    found["tokens_per_round"] = {n: c["tokens_per_round"].get("spec") for n, c in cells.items()}
    return found


def medians(cells: Results, pairs: Sequence[str]) -> dict[str, dict[str, float]]:
    """{pair: {cell: median of its ratio}}, where it was measured."""
    return {pair: {name: cell[pair]["median"] for name, cell in cells.items() if pair in cell} for pair in pairs}


def measure(
    options: WorkOptions,
    work: Work,
    systems: Sequence[str],
    pairs: Sequence[str],
    results: Results,
    more: Callable[[Cell], Results] = lambda cell: {},
    sum_up: Callable[[Results, Sequence[str]], Results] = summary,
) -> None:
    """Fill `results` (a `head` and what else tells measurements apart) with every cell, writing after each.

    `pairs` are the ratios to sum up, "plain_over_hf"; `more(cell)` adds to the cell that was just measured, and
    `sum_up(cells, pairs)` makes the keys beside the cells.
    """
    from specroll.bench.rollout import report
    from specroll.cli.bench_view import show_cell

    def run(cell: Cell, progress: Progress) -> Results:
        done, total = count(1), len(systems) * (options.repeats + 1)
        rates = work.bench.run(
            cell,
            work.prompts,
            systems,
            options.repeats,
            lambda name, rate: progress(f"cell {cell.name}", next(done), total, f"{name} {rate:.0f} tokens/s"),
        )
        return report(cell, rates, work.bench.rounds) | more(cell)

    go_through(
        options.json,
        results,
        {cell.name: partial(run, cell) for cell in work.cells},
        lambda cells: sum_up(cells, pairs),
        lambda name, measured: show_cell(name, measured, pairs),
    )


def go_through(
    path: Path | None,
    results: Results,
    cells: Mapping[str, Callable[[Progress], Results]],
    sum_up: Callable[[Results], Results],
    show: Callable[[str, Results], None],
    *,
    key: str = "cells",
) -> None:
    """Measure the cells that `path` does not hold yet; show, sum up and write after each, so nothing can be lost.

    `key`: where in the results they are kept.
    """
    from specroll.cli.progress import Progress

    results |= _earlier(path, results)
    found = results.setdefault(key, {})
    if found and path is not None:
        print(f"Going on from {path}: {', '.join(found)} were measured before.")
    with Progress() as progress:
        for name, run in cells.items():
            if name not in found:
                found[name] = run(progress)
            show(name, found[name])
            results |= sum_up(found)
            _write(path, results)


class _Kept(Protocol):
    @property
    def json(self) -> Path | None: ...


def finish(options: _Kept, results: Results) -> None:
    _write(options.json, results | {"complete": True})
    if options.json:
        print(f"Written to {options.json}")


def _earlier(path: Path | None, results: Results) -> Results:
    """What the same command has measured on the same machine, before it was interrupted."""
    if path is None or not path.exists() or not path.stat().st_size:
        return {}
    try:
        earlier = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        earlier = {}
    expected = {key: results[key] for key in ("command", "machine", "complete")}
    if {key: earlier.get(key) for key in expected} != expected:
        raise FileExistsError(
            f"{path} holds a finished measurement or something else; name another file, or move this one away"
        )
    return earlier


def _write(path: Path | None, results: Results) -> None:
    from specroll.files import write_atomic

    if path is not None:
        write_atomic(path, (json.dumps(results, indent=1) + "\n").encode())
