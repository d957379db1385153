"""What the steps of `specroll bench adapt` add up to: rates, ratios, and how sure they are.

In a step all systems sample the same requests one right after the other, so what slows a step slows all of them, and
ratios are taken over the same steps. Intervals are percentiles of a bootstrap: seeds are drawn with replacement, and of
each as many steps as it has, in blocks of neighbours, because neighbouring steps are alike. Knows numbers and names.

    R  resamples, the steps as they are in front    N  steps of all seeds, one seed after the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
BLOCK = 5
"""Steps that are drawn together."""
CONFIDENCE = 0.95
SLOW = ("heads+slow", "full")
"""Systems with a slow path."""

Step = Mapping[str, Any]
"""`step`, `shifted`, `train_s`, and `systems`: by name what `adapt.Contest` notes of each."""
Floats = NDArray[np.float64]


def figures(seeds: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """The documented keys that steps alone tell, of the steps before the shift and of those after it, if any.

    Needs one seed or more.
    """
    parts = {
        "ablation": [[step for step in steps if not step["shifted"]] for steps in seeds],
        "after_shift": [[step for step in steps if step["shifted"]] for steps in seeds],
    }
    measured = {part: Steps(steps) for part, steps in parts.items() if all(steps)}
    systems = list(seeds[0][0]["systems"])
    return {
        **{part: {system: steps.of(system) for system in systems} for part, steps in measured.items()},
        "over_plain": {part: steps.all_over("plain", systems) for part, steps in measured.items()},
        "over_heads": {part: steps.all_over("heads", systems) for part, steps in measured.items()},
        "full_over": {
            part: {system: steps.over("full", system) for system in ("heads+reflex", "heads+slow")}
            for part, steps in measured.items()
        },
        "slow_overhead": slow_overhead([step for steps in seeds for step in steps]),
    }


class Steps:
    """Measured steps of several seeds, each with at least one. All figures share the resamples."""

    def __init__(self, seeds: Sequence[Sequence[Step]], draw: int = 0) -> None:
        """`draw` is the seed of the resamples: other measurements need others."""
        self._steps = [step for steps in seeds for step in steps]
        self._seeds = len(seeds)
        self._drawn_RN = resamples([len(steps) for steps in seeds], seed=draw)

    def of(self, system: str) -> dict[str, float]:
        """Tokens per round, and per second with its interval; what heads learn between rollouts is paid for."""
        proposed = self._column(system, "proposed").sum()
        end_N = np.array([step["train_s"] for step in self._steps]) + self._seconds(system)
        return {
            "tokens_per_round": float(self._column(system, "emitted").sum() / self._column(system, "turns").sum()),
            "acceptance": float(self._column(system, "accepted").sum() / proposed) if proposed else 0.0,
            **estimate(self._rate_R(system), "tokens_per_second"),
            "end_to_end_s": float(end_N.sum() / self._seeds),
            "differing_samples": int(self._column(system, "differing").sum()),
        }

    def over(self, system: str, base: str) -> dict[str, float]:
        """Tokens per second of one system over another's, in the same steps."""
        return estimate(self.over_R(system, base), "ratio")

    def all_over(self, base: str, systems: Sequence[str]) -> dict[str, dict[str, float]]:
        return {system: self.over(system, base) for system in systems if system != base}

    def over_R(self, system: str, base: str) -> Floats:
        """The same of the steps as they are, and of each resample."""
        return self._rate_R(system) / self._rate_R(base)

    def end_to_end_over_R(self, system: str, base: str) -> Floats:
        """What a step took, training included, with `base` over what it took with `system`: above 1 is sooner."""
        train_N = np.array([step["train_s"] for step in self._steps])
        took_R, base_R = (self._drawn_RN @ (train_N + self._seconds(name)) for name in (system, base))
        return base_R / took_R

    def _rate_R(self, system: str) -> Floats:
        return (self._drawn_RN @ self._column(system, "tokens")) / (self._drawn_RN @ self._seconds(system))

    def _column(self, system: str, key: str) -> Floats:
        return np.array([step["systems"][system][key] for step in self._steps], dtype=np.float64)

    def _seconds(self, system: str) -> Floats:
        return self._column(system, "seconds") + self._column(system, "learning")


def slow_overhead(steps: Sequence[Step]) -> float:
    """Share of the rollouts' time that the slow path took: recording, watching and refreshing."""
    turns = [step["systems"][name] for step in steps for name in SLOW]
    return sum(t["recording"] + t["learning"] for t in turns) / sum(t["seconds"] for t in turns)


def resamples(lengths: Sequence[int], count: int = RESAMPLES, block: int = BLOCK, seed: int = 0) -> Floats:
    """How often each step is drawn, [1 + count, N]: once in the first row, which is the steps themselves.

    `lengths`: steps of each seed, all at least 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"every seed needs at least one step to draw from, got {list(lengths)}")
    generator = np.random.default_rng(seed)
    first = np.cumsum([0, *lengths])
    drawn_RN = np.zeros((1 + count, first[-1]))
    drawn_RN[0] = 1.0
    for chosen_R in generator.integers(len(lengths), size=(len(lengths), count)):
        for number, steps in enumerate(lengths):
            row_X1 = 1 + np.flatnonzero(chosen_R == number)[:, None]
            width = min(block, steps)
            begin_XB = generator.integers(steps, size=(len(row_X1), -(-steps // width)))
            # Around the end, or the first and last steps would be drawn less often than the others.
            place_XN = (begin_XB[:, :, None] + np.arange(width)).reshape(len(row_X1), -1)[:, :steps] % steps
            np.add.at(drawn_RN, (row_X1, first[number] + place_XN), 1.0)
    return drawn_RN


def estimate(value_R: Floats, name: str) -> dict[str, float]:
    """The value of the steps as they are, and the interval of the resamples'."""
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(value_R[1:], [tail, 1.0 - tail])
    return {name: float(value_R[0]), "low": float(low), "high": float(high)}
