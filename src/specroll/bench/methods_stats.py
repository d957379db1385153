"""What the cells of `specroll bench methods` add up to: each method's figures, and ratios over settings with intervals.

A cell is one method in one training. Ratios are taken within a training, step by step (`adapt_stats`), so what slows a
step slows all methods of it. Knows numbers and names.

    R  resamples, the steps as they are in front
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specroll.bench.adapt_stats import Floats, Step, Steps, estimate

Cell = Mapping[str, Any]
SETTING = ("model", "data", "top_p", "batch")
SHARED = ("epoch", "train_s")
"""Of a step, what is the same for all methods."""

OVER: Mapping[str, tuple[str, str, Callable[[Steps, str, str], Floats]]] = {
    "specroll_over_fastgrpo_generation": ("specroll", "fastgrpo", Steps.over_R),
    "specroll_over_fastgrpo_end_to_end": ("specroll", "fastgrpo", Steps.end_to_end_over_R),
    "specroll_over_plain_generation": ("specroll", "plain", Steps.over_R),
    "specroll_over_heads_generation": ("specroll", "heads", Steps.over_R),
    "heads_over_plain_generation": ("heads", "plain", Steps.over_R),
    "fastgrpo_over_plain_generation": ("fastgrpo", "plain", Steps.over_R),
}
"""The summaries: a method over another one, in tokens per second of generation or in the time of a whole step."""


def cells_of(setting: Mapping[str, Any], seed: int, steps: Sequence[Step]) -> dict[str, dict[str, Any]]:
    """A training's cell of each method: the documented keys, and of every step what summaries are made of."""
    return {method: _cell(setting, seed, method, steps) for method in steps[0]["systems"]}


def _cell(setting: Mapping[str, Any], seed: int, method: str, steps: Sequence[Step]) -> dict[str, Any]:
    found = Steps([steps]).of(method)
    turns = [step["systems"][method] for step in steps]
    generation = sum(turn["seconds"] + turn["learning"] for turn in turns)
    return {
        **{key: setting[key] for key in SETTING},
        "method": method,
        "seed": seed,
        "generation_s": generation,
        "end_to_end_s": found["end_to_end_s"],
        "generation_share": generation / found["end_to_end_s"],
        "tokens_per_round": found["tokens_per_round"],
        "acceptance": found["acceptance"],
        "reward": sum(step["reward"] for step in steps) / len(steps),
        "steps": [{**{key: step[key] for key in SHARED}, **step["systems"][method]} for step in steps],
    }


def summaries(cells: Iterable[Cell]) -> dict[str, Any]:
    """The documented keys beside the cells, as far as their methods were measured."""
    trainings = _by_setting(cells)
    found = {name: _over(trainings, *of) for name, of in OVER.items()}
    epochs = {step["epoch"] for seeds in trainings.values() for steps in seeds for step in steps}
    by_epoch = {str(epoch): _over(_only(trainings, epoch), "suffix", "plain", Steps.over_R) for epoch in sorted(epochs)}
    found["suffix_over_plain"] = {epoch: of for epoch, of in by_epoch.items() if of is not None} or None
    return {name: of for name, of in found.items() if of is not None}


def _over(
    trainings: Mapping[str, list[list[Step]]], system: str, base: str, of: Callable[[Steps, str, str], Floats]
) -> dict[str, Any] | None:
    """The ratio in each setting, the least and the mean of them, and the mean's interval."""
    ratios = {
        name: of(Steps(seeds, draw=number), system, base)
        for number, (name, seeds) in enumerate(trainings.items())
        if all({system, base} <= step["systems"].keys() for steps in seeds for step in steps)
    }
    if not ratios:
        return None
    mean = estimate(np.mean(list(ratios.values()), axis=0), "mean")
    settings = {name: estimate(ratio_R, "ratio") for name, ratio_R in ratios.items()}
    return {"min": min(s["ratio"] for s in settings.values()), **mean, "settings": settings}


def _by_setting(cells: Iterable[Cell]) -> dict[str, list[list[Step]]]:
    """{setting: steps of each seed}, the methods of a training side by side again."""
    trainings: dict[tuple[str, int], dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        trainings[" ".join(str(cell[key]) for key in SETTING), cell["seed"]][cell["method"]] = cell
    found: dict[str, list[list[Step]]] = defaultdict(list)
    for (setting, _), methods in trainings.items():
        for_step = zip(*(cell["steps"] for cell in methods.values()), strict=True)
        found[setting].append(
            [{**{k: of[0][k] for k in SHARED}, "systems": dict(zip(methods, of, strict=True))} for of in for_step]
        )
    return found


def _only(trainings: Mapping[str, list[list[Step]]], epoch: int) -> dict[str, list[list[Step]]]:
    return {
        setting: [[step for step in steps if step["epoch"] == epoch] for steps in seeds]
        for setting, seeds in trainings.items()
    }
