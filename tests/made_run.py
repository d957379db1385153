"""A run's folder as a training would have left it, made in a moment: cold start, drift, refreshes, an end or none."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from specroll.report.records import RunFolder


def make_run(folder: Path, steps: int, *, asked: int | None = None, finished: bool = True) -> RunFolder:
    """The first sixteenth is plain decoding until heads have learned; from half on they drift; a first refresh at 0.7
    is rolled back, a second one at 0.75 is kept."""
    run = RunFolder(folder)
    run.start({"model": None, "task": "chain_sum", "steps": asked or steps})
    chance = random.Random(steps)
    for step in range(1, steps + 1):
        run.add_metrics(step, step_logs(step, steps, chance))
    if finished:
        run.write_summary({"steps": steps, "reward_before": 0.21, "reward_after": 0.78})
    return run


def step_logs(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    """The trainer's logs of one step."""
    place = step / steps
    learns = steps >= 32 and step in {steps // 50, steps // 25, steps // 12}
    speculates = steps < 32 or step > steps // 50
    drifted = max(0.0, place - 0.5) * 0.8 if place < 0.75 else 0.0
    worth = (0.55 - drifted) * min(1.0, 0.5 + 4 * place)
    logs: dict[str, Any] = {
        "loss": chance.gauss(0, 0.1),
        "reward": min(max(0.2 + 0.6 * (1 - math.exp(-3 * place)) + chance.gauss(0, 0.1), 0.0), 1.0),
        "step_time": (step_time := 12.0 + chance.gauss(0, 0.6)),
        "wall_seconds": step_time + 0.8 + 0.4 * chance.random() + 6 * (step % 20 == 1),
        "specroll/tokens_per_second": 60.0,
        "specroll/tokens_per_round": 1.0,
        "specroll/acceptance": 0.0,
        "specroll/generation_share": 0.45 - 0.15 * worth * speculates,
        "specroll/logp_gap_mean": 6e-6 * math.exp(chance.gauss(0, 0.2)),
        "specroll/logp_gap_max": 5e-5 * math.exp(chance.gauss(0, 0.5)),
    }
    if speculates:
        shares = [min(max(worth ** (k + 0.4) + chance.gauss(0, 0.03), 0.0), 1.0) for k in range(1, 5)]
        logs |= {f"specroll/acceptance_{k}": share for k, share in enumerate(shares, 1)}
        logs["specroll/acceptance"] = sum(shares) / 6
        logs["specroll/tokens_per_round"] = 1 + sum(shares)
        logs["specroll/tokens_per_second"] = 55 * (1 + 0.8 * sum(shares)) + chance.gauss(0, 3)
        logs["specroll/reflex_open"] = float(chance.random() < 0.9 - 0.3 * place)
    if learns:
        logs |= {"specroll/learning_seconds": 4.0, "specroll/heads_version": 1.0}
    watched = speculates and step > steps // 12 and step % max(steps // 40, 1) == 0
    if watched:
        logs["specroll/drift_score"] = 25 * drifted + chance.gauss(0.3, 0.7)
        logs["specroll/regret"] = 0.2 + drifted / 2 + chance.gauss(0, 0.01)
        logs |= {"specroll/triggers": float(place >= 0.7) + float(place >= 0.75), "specroll/slow_share": 0.015}
    if steps >= 32 and step in (int(0.7 * steps), int(0.75 * steps)):
        logs |= {"specroll/refresh_kept": float(step > 0.72 * steps), "specroll/learning_seconds": 3.0}
    return logs
