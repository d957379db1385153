"""What `specroll bench scale` runs: ever longer queues and ever longer contexts, on one engine.

A queue's prompts all differ, so no pass is shared, and are as long as each other; responses have one length and no end
of their own. So every request is the same work, and a queue's rate, its prompts' passes included, shows what waiting
requests cost. A context's rate is that of its rounds alone. Knows no command line and keeps no results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain, count, cycle, islice
from typing import Any

import psutil
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specroll.bench.compare import ratio, take_turns
from specroll.bench.memory import own_peak_bytes
from specroll.bench.profile import rounds_of, without_ends
from specroll.build import encode
from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Completion, Request, SamplingParams

SLOTS = 32
"""Sequences that a queue's requests take turns in."""
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 3
"""Of a queued request: thousands take minutes, and admitting them is most of the engine's own work."""
CONTEXT_TOKENS = 24
"""New tokens of each sequence behind a context."""

Run = Callable[[int], float]
"""Repeat's number -> tokens per second."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The process while a queue is worked off, in bytes: when a tenth of its requests is done, and at the last one."""

    tenth: int
    end: int
    peak_tenth: int
    peak_end: int
    results: int
    """What the caller was given in between: completions, and what each round did."""

    def summary(self) -> dict[str, float]:
        """The bytes, and in percent of the tenth's: the growth, that without the results, and the peak's."""
        grown = self.end - self.tenth
        return {
            **{f"{item.name}_bytes": getattr(self, item.name) for item in fields(self)},
            "growth": 100 * grown / self.tenth,
            "growth_without_results": 100 * (grown - self.results) / self.tenth,
            "peak_growth": 100 * (self.peak_end - self.peak_tenth) / self.peak_tenth,
        }


def engines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heads: FutureHeads | None, max_nodes: int
) -> dict[str, Engine]:
    """The plain loop and, with heads, speculation, around one target: the same slots and packed weights."""
    config = EngineConfig(max_running=SLOTS)
    made = {"plain": Engine(model, tokenizer, config=config)}
    if heads is not None:
        proposer = HeadsProposer(heads, model)
        budget = BudgetConfig(max_nodes=max_nodes)
        made["spec"] = Engine(model, tokenizer, proposer=proposer, config=config, budget=budget)
        made["spec"].target = made["plain"].target
    return made


def queue_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], size: int) -> list[tuple[int, ...]]:
    """`size` different prompts of `PROMPT_TOKENS` tokens: a number, and the beginning of a text."""
    ids = encode(tokenizer, texts, chat=False)
    numbers = encode(tokenizer, [f"{n}." for n in range(size)], chat=False)
    endless = (chain(number, cycle(ids[n % len(ids)])) for n, number in enumerate(numbers))
    return [tuple(islice(tokens, PROMPT_TOKENS)) for tokens in endless]


def fitting(contexts: Sequence[int], positions: int | None) -> list[int]:
    """The contexts that leave room for `CONTEXT_TOKENS`; in place of those that do not, the longest that does.

    Raises ValueError where the model's `positions` hold none at all.
    """
    if not contexts or positions is None or max(contexts) + CONTEXT_TOKENS <= positions:
        return list(contexts)
    longest = positions - CONTEXT_TOKENS
    if longest < 1:
        raise ValueError(f"the model has {positions} positions, and a context needs {CONTEXT_TOKENS} behind it")
    return list(dict.fromkeys([c for c in contexts if c <= longest] + [longest]))


def run_queue(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> tuple[float, Memory]:
    """Tokens per second of all the prompts' requests, prefill included, and the memory at two of their ends."""
    requests = [Request(prompt_ids=p, sample=i, max_new_tokens=RESPONSE_TOKENS) for i, p in enumerate(prompts)]
    tenth = max(1, len(requests) // 10)
    ended, seen = count(1), []

    def completed(index: int, completion: Completion) -> None:
        if next(ended) in (tenth, len(requests)):
            seen.append((psutil.Process().memory_info().rss, own_peak_bytes()))

    with without_ends(engine):
        started = time.perf_counter()
        rollout = engine.generate(requests, SamplingParams(top_p=0.95), on_completion=completed)
        seconds = time.perf_counter() - started
    (first, peak_first), (last, peak_last) = seen[0], seen[-1]
    results = round(held_bytes(rollout) * (1 - tenth / len(requests)))  # equal work: they came evenly
    return rollout.tokens / seconds, Memory(first, last, peak_first, peak_last, results)


def held_bytes(thing: Any) -> int:
    """What a rollout, or a part of it, takes in memory: every object once."""
    seen: dict[int, Any] = {}
    todo = [thing]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if is_dataclass(thing):
            todo += [getattr(thing, item.name) for item in fields(thing)]
        elif isinstance(thing, list | tuple):
            todo += thing
        elif isinstance(thing, dict):
            todo += [*thing, *thing.values()]
    return sum(map(sys.getsizeof, seen.values()))


def run_context(engine: Engine, prompt: tuple[int, ...], running: int, repeat: int) -> float:
    """Tokens per second of the rounds in which `running` responses to the prompt go on, its own pass not counted."""
    rounds = rounds_of(engine, [prompt], running, CONTEXT_TOKENS, repeat * running)
    seconds = sum(t for r in rounds for stage, t in r.seconds.items() if stage != "prefill")
    return sum(r.emitted for r in rounds) / seconds


def queue_runs(
    made: Mapping[str, Engine], prompts: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> tuple[dict[tuple[str, int], Run], dict[str, list[Memory]]]:
    """The runs by system and size, and by system what the longest queue's repeats will have shown of the memory."""
    memory: dict[str, list[Memory]] = {name: [] for name in made}

    def run(name: str, size: int, repeat: int) -> float:
        rate, found = run_queue(made[name], prompts[:size])
        if size == max(sizes) and repeat >= 0:
            memory[name].append(found)
        return rate

    return {(name, size): partial(run, name, size) for size in sizes for name in made}, memory


def context_runs(
    made: Mapping[str, Engine], ids: Sequence[int], contexts: Sequence[int], running: int
) -> dict[tuple[str, int], Run]:
    """The runs by system and context. `ids` are the text's tokens, from which each repeat takes another stretch."""

    def run(name: str, length: int, repeat: int) -> float:
        start = (repeat + 1) * length % len(ids)
        return run_context(made[name], tuple(islice(cycle(ids), start, start + length)), running, repeat + 1)

    return {(name, length): partial(run, name, length) for length in contexts for name in made}


def flatness(
    runs: Mapping[tuple[str, int], Run], repeats: int, on_run: Callable[[str, float], None]
) -> dict[str, dict[str, Any]]:
    """Tokens per second by system and size, and their ratios to the system's first size, in the same repeat.

    The sizes take turns, so that a slow moment of the machine falls on none of them alone. Each system's first size is
    run once before, uncounted.
    """
    first: dict[str, int] = {}
    for name, size in runs:
        if name not in first:
            first[name] = size
            on_run(f"{name} {size}", runs[name, size](-1))
    rates = take_turns({f"{name} {size}": run for (name, size), run in runs.items()}, repeats, 0, on_run)
    found: dict[str, dict[str, Any]] = {"tokens_per_second": {}, "over_first": {}}
    for name, size in runs:
        over = ratio(rates, f"{name} {size}", f"{name} {first[name]}")
        found["tokens_per_second"].setdefault(name, {})[str(size)] = rates[f"{name} {size}"].summary()
        found["over_first"].setdefault(name, {})[str(size)] = over
    return found
