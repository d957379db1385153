"""Do plain and speculative GRPO learn alike where rounding decides ties? Reward over the steps, in bfloat16.

    python scripts/reward_curves.py --seeds 3 --steps 30 --output runs/curves --json docs/results/reward_curves.json

In float32 both draw the same tokens (tests/unit/train/test_equality.py). In bfloat16 passes of other shapes round in
other ways, so responses of the same law go apart now and then, and their trainings with them. Each seed is trained
twice by `specroll train`; runs that are whole in the output folder are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import torch

from specroll.device import best, machine
from specroll.report.records import RunFolder

HEADS = {"plain": "none", "speculative": "learn"}
CONFIDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36}
"""Student's t for 95 %, by number of seeds."""


def rewards(folder: Path, heads: str, seed: int, steps: int) -> tuple[list[float], float]:
    """The reward of every step, and tokens per round over all of them."""
    run = RunFolder(folder)
    if not (run.metrics_path.exists() and len(run.metrics()) == steps):
        options = ["--heads", heads, "--seed", seed, "--steps", steps, "--dtype", "bfloat16", "--output", folder]
        command = [Path(sys.executable).with_name("specroll"), "train", *options]
        subprocess.run([str(part) for part in command], check=True)
    records = run.metrics()
    return [record["reward"] for record in records], mean(record["specroll/tokens_per_round"] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(CONFIDENT))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("runs/curves"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    curves: dict[str, list[list[float]]] = {name: [] for name in HEADS}
    per_round: list[float] = []
    for seed in range(args.seeds):
        for name, heads in HEADS.items():
            curve, rounds = rewards(args.output / f"{name}-{seed}", heads, seed, args.steps)
            curves[name].append(curve)
            per_round += [rounds] if heads == "learn" else []
    off = [mean(b) - mean(a) for a, b in zip(*curves.values(), strict=True)]
    half = CONFIDENT[args.seeds] * stdev(off) / math.sqrt(args.seeds)
    results = {
        "command": "python scripts/reward_curves.py " + " ".join(sys.argv[1:]),
        "machine": machine(best(), torch.bfloat16),
        "steps": args.steps,
        "rewards": curves,
        "tokens_per_round": mean(per_round),
        "mean_reward": {name: mean(map(mean, of)) for name, of in curves.items()},
        "difference": {"mean": mean(off), "low": mean(off) - half, "high": mean(off) + half},
    }
    print(json.dumps({key: results[key] for key in ("mean_reward", "difference", "tokens_per_round")}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
