"""Does torch.compile pay for decoder layers? A pass of their first few, compiled and not, by kind of round.

    python scripts/compiled_layers.py --model MODEL --json docs/results/compiled_layers.json

Attention and packed products stay as they are (the compiler cannot look into them), so what could be fused is what
stands between them: norms, rotary embedding, activations, sums.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AttentionInterface

from specroll import load_model
from specroll.device import machine
from specroll.model import attention
from specroll.model.target import HFTarget
from specroll.tree.grow import grow
from specroll.types import Draft, Tree

CONTEXT, REPEATS = 200, 40
ROUNDS = {"1": (1, 0), "1 + 4 nodes": (1, 4), "4": (4, 0), "4 + 8 nodes": (4, 2)}  # sequences, nodes of each


def tree(sequences: int, nodes: int) -> Tree:
    hit_SKC = torch.full((sequences, max(nodes, 1), 1), 0.5)
    token_SKC = torch.full(hit_SKC.shape, 7)
    return grow(Draft(token_SKC, hit_SKC.log(), hit_SKC), torch.full((sequences,), 5), nodes)


def use(layers: Any, forwards: list[Any] | None) -> None:
    for i, layer in enumerate(layers):
        if forwards is None:
            del layer.forward
        else:
            layer.forward = forwards[i]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 512  # each layer has packs of its own
    AttentionInterface.register(attention.NAME, torch._dynamo.disable(attention._attention))
    model: Any = load_model(options.model)[0]
    layers = model.model.layers = model.model.layers[: options.layers]
    model.config.num_hidden_layers = options.layers
    target = HFTarget(model)
    trees = {name: tree(*sizes) for name, sizes in ROUNDS.items()}

    def run(name: str) -> float:
        started = time.perf_counter()
        lengths_S = torch.full((ROUNDS[name][0],), CONTEXT)
        target.forward_tree(trees[name], lengths_S, CONTEXT)
        return time.perf_counter() - started

    with target.rolling_out():
        target.reserve(4, 2 * CONTEXT)
        compiled = [torch.compile(layer.forward, dynamic=True) for layer in layers]
        use(layers, compiled)
        first = sum(run(name) for name in ROUNDS)
        use(layers, None)
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"eager": [], "compiled": []})
        for _ in range(REPEATS):
            for kind in ("eager", "compiled"):
                if kind == "compiled":
                    use(layers, compiled)
                for name in ROUNDS:
                    seconds[name][kind].append(run(name))
            use(layers, None)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(target.device, model.dtype),
        "layers": options.layers,
        "compile_seconds": first,
        "pass_ms": {n: {kind: 1e3 * median(s) for kind, s in kinds.items()} for n, kinds in seconds.items()},
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["pass_ms"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
