"""What `specroll bench` times: transformers' generate, our plain loop, our speculative engine, and peers.

Two kinds of cells. "Running R": R sequences decode the same fixed number of tokens (no EOS), so R run throughout; a
single one may end, and what other samplers say then has another length.
"P x G": P prompts with G responses each, to the last row, with EOS. Every system gets the same model, prompts and law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specroll.bench.by_rounds import over_plain_by_rounds
from specroll.bench.compare import Rates, System, interleave, ratio
from specroll.config import BudgetConfig, EngineConfig, ReflexName
from specroll.engine import Engine, Rollout
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Request, RoundStats, SamplingParams

Prompts = Sequence[tuple[int, ...]]
Ask = Callable[[Prompts, int, Sequence[int], int], int]
"""(rows, most tokens of each, ids that end one, seed) -> tokens made: a system in another process."""

PAIRS = (
    ("plain", "hf"),
    ("plain", "vllm"),
    ("spec", "plain"),
    ("spec", "vllm"),
    ("spec", "hf"),
    ("spec", "lean"),
    ("lean", "plain"),
    ("hidden", "lean"),
    ("untrained", "plain"),
    ("optimal", "paper"),
    ("optimal", "plain"),
    ("paper", "plain"),
    ("random", "plain"),
    ("hostile", "plain"),
    ("control", "plain"),
)
REFLEX: ReflexName = BudgetConfig().reflex
MAX_RUNNING = 64
"""Sequences that a system decodes together; all of them have the same."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `prompts` distinct ones, `group` responses each, up to `tokens` new tokens each."""

    name: str
    prompts: int
    group: int
    tokens: int
    ends: bool  # whether EOS ends a response

    @property
    def rows(self) -> int:
        return self.prompts * self.group


def running_cell(running: int, tokens: int) -> Cell:
    """So many sequences from the first token to the last, which several only are if EOS does not end them.

    What follows an EOS is text that nobody samples and no head has learned, so a single one may end.
    """
    group = min(running, 8)
    return Cell(str(running), running // group, group, tokens, ends=running == 1)


def batch_cell(name: str, tokens: int) -> Cell:
    """ "8x8" is 8 prompts x 8 responses."""
    prompts, _, group = name.partition("x")
    return Cell(name, int(prompts), int(group), tokens, ends=True)


class Bench:
    """The systems under test, sharing one model."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heads: FutureHeads | None, max_nodes: int
    ) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=0)
        self.engines = {"plain": Engine(model, tokenizer, config=EngineConfig(max_running=MAX_RUNNING))}
        proposers: dict[str, tuple[FutureHeads, ReflexName]] = {"untrained": (FutureHeads.for_model(model), REFLEX)}
        if heads is not None:
            proposers |= {"spec": (heads, REFLEX), "lean": (heads, "off"), "hidden": (heads, "hidden")}
        for name, (proposed, reflex) in proposers.items():
            self.engines[name] = Engine(
                model,
                tokenizer,
                proposer=HeadsProposer(proposed, model, reflex=reflex),
                config=EngineConfig(max_running=MAX_RUNNING),
                budget=BudgetConfig(max_nodes=max_nodes),
            )
        self.peers: dict[str, Ask] = {}
        self.rounds: dict[str, list[RoundStats]] = {}
        """What each engine did in the counted repeats of the latest cell."""

    @property
    def systems(self) -> dict[str, Callable[[Cell, Prompts], System]]:
        """What can be timed, by name."""
        ours = {name: partial(self._ours, name) for name in self.engines}
        return {"hf": self._hf, **ours, **{name: partial(self._peer, ask) for name, ask in self.peers.items()}}

    def run(
        self, cell: Cell, prompts: Prompts, systems: Sequence[str], repeats: int, on_run: Callable[[str, float], None]
    ) -> dict[str, Rates]:
        self.rounds = {name: [] for name in systems if name in self.engines}
        makers = self.systems
        return interleave({name: makers[name](cell, prompts) for name in systems}, repeats, on_run=on_run)

    def _chosen(self, cell: Cell, prompts: Prompts, repeat: int) -> list[tuple[int, ...]]:
        """The cell's rows in repeat `repeat`: other prompts each time, the same for every system."""
        start = (repeat + 1) * cell.prompts
        return [prompts[(start + i) % len(prompts)] for i in range(cell.prompts) for _ in range(cell.group)]

    def _ours(self, name: str, cell: Cell, prompts: Prompts) -> System:
        engine = self.engines[name]
        eos_ids = engine.eos_ids

        def run(repeat: int) -> int:
            rows = self._chosen(cell, prompts, repeat)
            requests = [
                Request(prompt_ids=p, sample=(repeat + 1) * cell.rows + i, max_new_tokens=cell.tokens)
                for i, p in enumerate(rows)
            ]
            engine.eos_ids = eos_ids if cell.ends else frozenset()
            try:
                rollout = engine.generate(requests, self.sampling)
            finally:
                engine.eos_ids = eos_ids
            if repeat >= 0:
                self.rounds[name] += rollout.rounds
            return rollout.tokens

        return run

    def _hf(self, cell: Cell, prompts: Prompts) -> System:
        """As TRL calls it: one left-padded batch, sampling, until every row has ended."""
        eos_ids = sorted(self.engines["plain"].eos_ids)
        pad = self.tokenizer.pad_token_id or 0
        config = GenerationConfig(
            do_sample=True,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=0,
            max_new_tokens=cell.tokens,
            eos_token_id=eos_ids if cell.ends else None,
            pad_token_id=pad,
            disable_compile=True,
        )

        def run(repeat: int) -> int:
            torch.manual_seed(repeat)
            rows = self._chosen(cell, prompts, repeat)
            longest = max(map(len, rows))
            ids = torch.tensor([[pad] * (longest - len(r)) + list(r) for r in rows], device=self.model.device)
            mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=self.model.device)
            with torch.no_grad():
                out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            return _count(out[:, longest:].tolist(), set(eos_ids) if cell.ends else set())

        return run

    def _peer(self, ask: Ask, cell: Cell, prompts: Prompts) -> System:
        eos_ids = sorted(self.engines["plain"].eos_ids) if cell.ends else []
        return lambda repeat: ask(self._chosen(cell, prompts, repeat), cell.tokens, eos_ids, repeat + 1)


def _count(rows: list[list[int]], eos_ids: set[int]) -> int:
    """Tokens up to and including each row's EOS."""
    return sum(next((i for i, token in enumerate(row, 1) if token in eos_ids), len(row)) for row in rows)


def report(cell: Cell, rates: dict[str, Rates], rounds: dict[str, list[RoundStats]]) -> dict[str, Any]:
    """Everything measured in one cell."""
    ours = {name: Rollout([], of_all, 0.0) for name, of_all in rounds.items()}
    return {
        "rows": cell.rows,
        "tokens": cell.tokens,
        "tokens_per_second": {name: r.summary() for name, r in rates.items()},
        "tokens_per_round": {name: rollout.tokens_per_round for name, rollout in ours.items()},
        "acceptance": {name: rollout.acceptance for name, rollout in ours.items()},
        "nodes_per_row": {name: _nodes(rollout) for name, rollout in ours.items()},
        "stage_seconds": {name: stage_seconds(rollout) for name, rollout in ours.items()},
        "by_rounds": over_plain_by_rounds(rounds) if "plain" in rounds else {},
        **{f"{a}_over_{b}": found for a, b in PAIRS if (found := ratio(rates, a, b)) is not None},
    }


def _nodes(rollout: Rollout) -> float:
    turns = sum(r.running for r in rollout.rounds)
    return sum(r.proposed for r in rollout.rounds) / turns if turns else 0.0


def stage_seconds(rollout: Rollout) -> dict[str, float]:
    """Seconds by stage, over all rounds."""
    stages: dict[str, float] = {}
    for r in rollout.rounds:
        for stage, seconds in r.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    return stages
