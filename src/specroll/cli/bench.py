"""`specroll bench rollout`: how fast, against what a user has today, by ratios measured in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    systems: tuple[str, ...] = ("hf", "plain", "spec", "untrained")
    """Which systems to time."""
    tokens: int = 72
    """New tokens of a running cell (a third of it from 32 sequences up), and twice that at most in a batch."""
    repeats: int = 5
    """Counted repeats of every cell, after one that is not."""
    max_nodes: int = 16
    """Most tree nodes per sequence."""
    json: Path | None = None
    """Write the results here (keys: docs/commands.md)."""


def main(options: Options) -> int:
    import json

    from specroll.bench.rollout import Bench, batch_cell, machine, report, running_cell
    from specroll.build import encode
    from specroll.cli.bench_view import show_cell, show_summary
    from specroll.model.load import load_model
    from specroll.propose.store import load_heads
    from specroll.train.data import load_task

    model, tokenizer = load_model(options.model, dtype=options.dtype)
    heads = load_heads(options.heads, model) if options.heads else None
    systems = [s for s in options.systems if s != "spec" or heads is not None]
    cells = [running_cell(r, options.tokens if r < 32 else options.tokens // 3) for r in options.running]
    cells += [batch_cell(b, 2 * options.tokens) for b in options.batches]
    task = load_task(options.task, data_dir=options.data_dir, split="held_out", size=64)
    prompts = encode(tokenizer, list(task.dataset["prompt"]))
    bench = Bench(model, tokenizer, heads, options.max_nodes)
    results: dict = {"command": _command(), "machine": machine(model), "cells": {}}
    for cell in cells:
        rates = bench.run(cell, prompts, systems, options.repeats, lambda name, rate: None)
        results["cells"][cell.name] = report(cell, rates, bench.last)
        show_cell(cell.name, results["cells"][cell.name])
        results |= summary(results["cells"])
        if options.json:  # after every cell, so that an interruption loses nothing
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if heads is not None:
        results["peak_memory_ratio"] = _memory_ratio(options, prompts, model, heads)
    show_summary(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"Written to {options.json}")
    return 0


def summary(cells: dict) -> dict:
    """The documented keys: medians of ratios by running sequences, and the same by batch."""
    pairs = ("plain_over_hf", "spec_over_plain", "spec_over_hf", "untrained_over_plain")
    found: dict = {p: {n: c[p]["median"] for n, c in cells.items() if p in c and "x" not in n} for p in pairs}
    found["batch"] = {p: {n: c[p]["median"] for n, c in cells.items() if p in c and "x" in n} for p in pairs}
    found["tokens_per_round"] = {n: c["tokens_per_round"].get("spec") for n, c in cells.items()}
    return found


def _memory_ratio(options: Options, prompts: list[tuple[int, ...]], model, heads) -> dict:
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
