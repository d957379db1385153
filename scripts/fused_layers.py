"""What fused decoder layers are worth: passes of a model with them and with its layers as they are, in turn.

python scripts/fused_layers.py --model MODEL --json docs/results/fused_layers.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from specroll import load_model
from specroll.device import machine
from specroll.engine.measure import chain_pass
from specroll.model.target import HFTarget

REPEATS = 30
PASSES = {"1": (1, 1), "1 x 9": (1, 9), "4": (4, 1), "4 x 4": (4, 4), "8": (8, 1), "32": (32, 1)}
"""Sequences and rows of each."""
KINDS = {"as they are": "1", "fused": "0"}
"""Values of PyTorch's own switch."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    model: Any = load_model(options.model, dtype=options.dtype)[0]
    target = HFTarget(model)
    target.reserve(32, 256)

    started = time.perf_counter()
    with target.rolling_out():
        first = time.perf_counter() - started
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(REPEATS):
        for kind, disabled in KINDS.items():
            os.environ["TORCHDYNAMO_DISABLE"] = disabled
            with target.rolling_out():
                for name, (running, size) in PASSES.items():
                    run = chain_pass(target, running=running, size=size)
                    run()  # layers turn to their programs in the first pass
                    started = time.perf_counter()
                    run()
                    seconds[name][kind].append(time.perf_counter() - started)
    passes = {n: {kind: 1e3 * median(s) for kind, s in kinds.items()} for n, kinds in seconds.items()}
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(target.device, model.dtype),
        "first_rollout_s": first,
        "pass_ms": {n: {**ms, "ratio": ms["as they are"] / ms["fused"]} for n, ms in passes.items()},
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["pass_ms"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
