"""`specroll bench scale`: whether cost stays linear, in the requests that wait and in the tokens behind a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from specroll.cli.common import check_at_least
from specroll.cli.measure import Results, TimingOptions, finish, go_through, head_of, load

if TYPE_CHECKING:
    from specroll.bench.scale import Run
    from specroll.cli.measure import Loaded
    from specroll.cli.progress import Progress
    from specroll.engine import Engine

_MOST_RUNNING = 32  # bench.scale.SLOTS, which costs seconds to import


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """Time ever longer queues and ever longer contexts on one engine: the plain loop, and with --heads speculation.

    Tokens per second should stay flat in the number of queued prompts, and memory flat while the longest queue is
    worked off.
    """

    queue: tuple[int, ...] = (64, 256, 1024, 2048)
    """Numbers of queued prompts, all different and of equal work."""
    contexts: tuple[int, ...] = (256, 1024, 2048, 4096)
    """Prompt tokens behind the running sequences, or as many as the model has positions for."""
    running: tuple[int, ...] = (1, 4)
    """Numbers of sequences that run behind each context: responses to one prompt."""
    repeats: int = 2
    """Counted repeats of every size, in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("queue", "contexts", "running"):
            check_at_least(1, **{f"each of {name}": min(getattr(self, name), default=1)})
        if max(self.running, default=1) > _MOST_RUNNING:
            raise ValueError(f"each of running must be at most {_MOST_RUNNING}, got {max(self.running)}")
        if not self.queue and not (self.contexts and self.running):
            raise ValueError("nothing to measure: give --queue, or --contexts and --running")


def main(options: Options) -> int:
    from specroll.bench.scale import CONTEXT_TOKENS, engines, fitting

    loaded = load(options)
    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    contexts = fitting(options.contexts, positions)
    cut = None if contexts == list(options.contexts) else {"positions": positions, "longest": max(contexts)}
    if cut:
        print(f"The model has {positions} positions: contexts reach {max(contexts)} tokens.", flush=True)
    made = engines(loaded.model, loaded.tokenizer, loaded.heads, options.max_nodes)
    cells = _cells(options, made, loaded, contexts)
    results = head_of(loaded.model) | {"context_cut": cut, "context_tokens": CONTEXT_TOKENS}
    go_through(options.json, results, cells, partial(sum_up, speculated="spec" in made), show)
    _show_memory(results)
    finish(options, results)
    return 0


def _cells(
    options: Options, made: Mapping[str, Engine], loaded: Loaded, contexts: list[int]
) -> dict[str, Callable[[Progress], Results]]:
    """What is measured as one: the queues, and the contexts of each number of running sequences."""
    from specroll.bench.scale import PROMPT_TOKENS, RESPONSE_TOKENS, context_runs, queue_prompts, queue_runs
    from specroll.build import encode

    texts = [str(messages[-1]["content"]) for messages in loaded.prompts]
    ids = list(chain.from_iterable(encode(loaded.tokenizer, texts, chat=False)))

    def queues(progress: Progress) -> Results:
        prompts = queue_prompts(loaded.tokenizer, texts, max(options.queue))
        runs, memory = queue_runs(made, prompts, options.queue)
        size = {"prompt_tokens": PROMPT_TOKENS, "response_tokens": RESPONSE_TOKENS}
        found = _turns("queue", runs, options.repeats, progress)
        return size | found | {"memory": {name: [m.summary() for m in of_one] for name, of_one in memory.items()}}

    def behind(running: int, progress: Progress) -> Results:
        return _turns(f"context {running}", context_runs(made, ids, contexts, running), options.repeats, progress)

    cells: dict[str, Callable[[Progress], Results]] = {"queue": queues} if options.queue else {}
    if contexts:
        cells |= {f"context {running}": partial(behind, running) for running in options.running}
    return cells


def _turns(stage: str, runs: Mapping[tuple[str, int], Run], repeats: int, progress: Progress) -> Results:
    from specroll.bench.scale import flatness

    done, total = count(1), len(runs) * repeats + len({name for name, _ in runs})
    return flatness(
        runs, repeats, lambda name, rate: progress(stage, next(done), total, f"{name}: {rate:.0f} tokens/s")
    )


def sum_up(cells: Results, speculated: bool) -> Results:
    """The documented keys: the plain loop's, and speculation's beside them."""
    return _of_system(cells, "plain") | {"speculation": _of_system(cells, "spec") if speculated else None}


def _of_system(cells: Results, system: str) -> Results:
    ratios = {
        name: {size: over["median"] for size, over in cell["over_first"][system].items()}
        for name, cell in cells.items()
    }
    memory = cells["queue"]["memory"][system] if "queue" in cells else []
    return {
        "queue": ratios.pop("queue", {}),
        "context": {name.removeprefix("context "): found for name, found in ratios.items()},
        "memory_growth": max((m["growth"] for m in memory), default=None),
        "memory_growth_without_results": max((m["growth_without_results"] for m in memory), default=None),
    }


def show(name: str, cell: Results) -> None:
    """A line per system: tokens per second by size, and the ratio to the first."""
    for system, rates in cell["tokens_per_second"].items():
        over = cell["over_first"][system]
        columns = (f"{size}: {rate['median']:.0f} ({over[size]['median']:.2f})" for size, rate in rates.items())
        print(f"{name}, {system}, tokens/s (over the first):  {'   '.join(columns)}", flush=True)


def _show_memory(results: dict[str, Any]) -> None:
    for system, memory in results["cells"].get("queue", {}).get("memory", {}).items():
        worst = max(memory, key=lambda m: m["growth"])
        print(
            f"Memory of the longest queue, {system}: {worst['tenth_bytes'] / 2**20:.0f} MiB at a tenth, "
            f"{worst['growth']:+.2f}% at the end ({worst['growth_without_results']:+.2f}% without the results)"
        )
