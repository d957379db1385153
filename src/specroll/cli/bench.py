"""`specroll bench rollout`: how fast, against what a user has today, by ratios measured in one process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from specroll.cli.common import check_at_least, check_writable, quiet_loading

SYSTEMS = ("hf", "plain", "spec", "untrained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Time transformers' generate, our plain loop and our speculative engine on the same work, interleaved.

    Without --heads only untrained heads are measured (they must cost nothing); `specroll heads fit` makes fitted ones.
    """

    model: str | None = None
    """Local folder or hub name; the default is SmolLM2-135M-Instruct."""
    heads: Path | None = None
    """Folder of heads that were fitted to the model."""
    task: str = "gsm_symbolic"
    """Where the prompts come from: a task name or a JSON Lines file."""
    data_dir: Path | None = None
    """Folder with the published sets as JSON Lines (also SPECROLL_DATA)."""
    dtype: str = "auto"
    """bfloat16, float32, or auto: what this device computes fast."""
    running: tuple[int, ...] = (1, 4, 8, 32, 64)
    """Numbers of running sequences; each decodes a fixed number of tokens."""
    batches: tuple[str, ...] = ("1x4", "2x8", "8x8")
    """Whole batches, PROMPTSxRESPONSES, that run down to the last row."""
    systems: tuple[str, ...] = SYSTEMS
    """Which systems to time."""
    tokens: int = 72
    """New tokens of a running cell (a third of it from 32 sequences up), and twice that at most in a batch."""
    repeats: int = 5
    """Counted repeats of every cell, after one that is not."""
    max_nodes: int = 16
    """Most tree nodes per sequence."""
    json: Path | None = None
    """Write the results here (keys: docs/commands.md); the same command goes on from there after an interruption."""

    def __post_init__(self) -> None:
        check_at_least(1, tokens=self.tokens, repeats=self.repeats, **{"each of running": min(self.running, default=1)})
        check_at_least(0, max_nodes=self.max_nodes)
        unknown = [s for s in self.systems if s not in SYSTEMS]
        if unknown or not self.systems:
            raise ValueError(f"systems are {', '.join(SYSTEMS)}; got {', '.join(unknown) or 'none'}")
        if bad := [b for b in self.batches if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", b)]:
            raise ValueError(f"a batch is PROMPTSxRESPONSES, such as 8x8; got {bad[0]!r}")
        if not self.running and not self.batches:
            raise ValueError("nothing to measure: give --running or --batches")


def main(options: Options) -> int:
    from specroll.bench.rollout import Bench, batch_cell, machine, report, running_cell
    from specroll.build import encode
    from specroll.cli.bench_view import show_cell, show_summary
    from specroll.cli.progress import Progress
    from specroll.model.load import load_model
    from specroll.propose.store import load_heads
    from specroll.train.data import load_task

    check_writable(options.json)
    cells = [running_cell(r, options.tokens if r < 32 else max(1, options.tokens // 3)) for r in options.running]
    cells += [batch_cell(b, 2 * options.tokens) for b in options.batches]
    with quiet_loading():
        model, tokenizer = load_model(options.model, dtype=options.dtype)
    heads = load_heads(options.heads, model) if options.heads else None
    systems = [s for s in options.systems if s != "spec" or heads is not None]
    if not systems:
        raise ValueError("the system spec needs --heads")
    own_file = options.task.endswith((".jsonl", ".jsonl.gz"))  # it has no held-out part, and nothing is learned here
    task = load_task(options.task, data_dir=options.data_dir, split="train" if own_file else "held_out", size=64)
    prompts = encode(tokenizer, list(task.dataset["prompt"]))
    bench = Bench(model, tokenizer, heads, options.max_nodes)
    results: dict[str, Any] = {"command": _command(), "machine": machine(model), "complete": False, "cells": {}}
    results["cells"] |= _finished(options.json, results)
    with Progress() as progress:
        for cell in cells:
            if cell.name not in results["cells"]:
                done, total = count(1), len(systems) * (options.repeats + 1)
                rates = bench.run(
                    cell,
                    prompts,
                    systems,
                    options.repeats,
                    lambda name, rate, cell=cell, done=done, total=total: progress(
                        f"cell {cell.name}", next(done), total, f"{name} {rate:.0f} tokens/s"
                    ),
                )
                results["cells"][cell.name] = report(cell, rates, bench.rounds)
            show_cell(cell.name, results["cells"][cell.name])
            results |= summary(results["cells"])
            _write(options.json, results)  # after every cell, so that an interruption loses nothing
    if heads is not None:
        results["peak_memory"] = _peak_memory(options, prompts, model, heads)
        results["peak_memory_ratio"] = results["peak_memory"]["ratio"]
    show_summary(results)
    _write(options.json, results | {"complete": True})
    if options.json:
        print(f"Written to {options.json}")
    return 0


def _finished(path: Path | None, results: dict[str, Any]) -> dict[str, Any]:
    """Cells that the same command has measured on the same machine, before it was interrupted."""
    if path is None or not path.stat().st_size:
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
    print(f"Going on from {path}: {', '.join(earlier['cells'])} were measured before.")
    return earlier["cells"]


def _write(path: Path | None, results: dict[str, Any]) -> None:
    from specroll.files import write_atomic

    if path is not None:
        write_atomic(path, (json.dumps(results, indent=1) + "\n").encode())


def summary(cells: dict) -> dict:
    """The documented keys: medians of ratios by running sequences, and the same by batch."""
    pairs = ("plain_over_hf", "spec_over_plain", "spec_over_hf", "untrained_over_plain")
    found: dict = {p: {n: c[p]["median"] for n, c in cells.items() if p in c and "x" not in n} for p in pairs}
    found["batch"] = {p: {n: c[p]["median"] for n, c in cells.items() if p in c and "x" in n} for p in pairs}
    found["tokens_per_round"] = {n: c["tokens_per_round"].get("spec") for n, c in cells.items()}
    return found


def _peak_memory(options: Options, prompts: list[tuple[int, ...]], model: Any, heads: Any) -> dict[str, float]:
    """Peak memory with speculation, less the heads, over the plain loop's: 8 x 8, 8 nodes in every round."""
    import torch

    from specroll.bench.memory import peak_bytes

    settings = {
        "model": options.model,
        "heads": None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "nodes": 8,
        "prompts": prompts[:8],
        "group": 8,
        "tokens": options.tokens,
        "threads": torch.get_num_threads(),
    }
    plain = peak_bytes(settings)
    spec = peak_bytes(settings | {"heads": str(options.heads)})
    own = sum(p.numel() * p.element_size() for p in heads.parameters())
    return {"plain_bytes": plain, "spec_bytes": spec, "heads_bytes": own, "ratio": (spec - own) / plain}


def _command() -> str:
    import sys

    return "specroll " + " ".join(sys.argv[1:])
