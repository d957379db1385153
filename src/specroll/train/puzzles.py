"""reasoning-gym's tasks: made on the spot, each with its own verifier.

An entry is named by a `spec`, JSON text of the task, its options, the seed and the index, from which it is made again
when it is scored: a data set column holds the name, never the entry, whose parts need not survive JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from typing import Any

HELD_OUT = 1_000_000_000
"""Distance of the held-out seed. Entry i is made from seed + i, so near seeds share most entries."""

# One-digit sums of two terms: a small instruct model solves a fifth of them, so there is room to learn.
OPTIONS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
}


def _library() -> Any:
    """reasoning-gym, without the complaints about a dependency's sources that Python makes when it compiles them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym.factory

        return reasoning_gym


def names() -> list[str]:
    """All tasks that can be made by name alone."""
    return sorted(set(_library().factory.DATASETS) - {"composite"})  # composite needs other data sets as options


def specs(name: str, *, size: int, seed: int, options: dict[str, Any]) -> list[str]:
    """Names of `size` entries. Raises `ValueError` for options that the task does not have or refuses."""
    options = {**OPTIONS.get(name, {}), **options}
    made_from = {"task": name, "options": options, "seed": seed, "size": size}
    _check(made_from)
    return [json.dumps({**made_from, "index": index}) for index in range(size)]


@functools.lru_cache(maxsize=8192)
def entry_of(spec: str) -> tuple[Any, dict[str, Any]]:
    """The data set that made an entry, which scores it too, and the entry: `question`, `answer`, `metadata`."""
    named = json.loads(spec)
    index = named.pop("index")
    dataset = _dataset(json.dumps(named))
    return dataset, dataset[index]


@functools.lru_cache(maxsize=32)
def _dataset(made_from: str) -> Any:
    named = json.loads(made_from)
    return _library().create_dataset(named["task"], seed=named["seed"], size=named["size"], **named["options"])


def _check(made_from: dict[str, Any]) -> None:
    name, options = made_from["task"], made_from["options"]
    _, config_type = _library().factory.DATASETS[name]
    known = [field.name for field in dataclasses.fields(config_type) if field.name not in ("seed", "size")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"task {name} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        _dataset(json.dumps(made_from))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {name} refuses its options {options}: {error}") from error
