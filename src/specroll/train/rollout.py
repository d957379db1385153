"""TRL's `rollout_func`: prompts in, exact samples of the trainer's own weights out.

Knows the trainer (its settings, template, state and metrics) and the engine; what a draw is, how heads learn and how
the loss is made are others' matters. For the one-line way in, see `trainer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import pad_across_processes

from specroll.config import PROPOSERS, BudgetConfig, EngineConfig, SlowConfig, proposer_names
from specroll.engine import Engine, Rollout
from specroll.slow.path import SlowPath
from specroll.train.proposers import Heads, InRun, Proposers
from specroll.train.terms import check_fit, sampling_of, tokenize, unwrapped
from specroll.types import Completion, Request

if TYPE_CHECKING:
    from trl import GRPOTrainer

Mode = Literal["train", "eval"]

# Bits of a sample's name, 63 in all: an int64 that is not negative.
_EVAL, _STEP, _CALL, _RANK, _ROW = 1, 22, 16, 10, 14


class SpecRollout:
    """A `rollout_func` for `trl.GRPOTrainer`: the same samples as plain decoding, sooner.

        trainer = GRPOTrainer(..., rollout_func=SpecRollout())

    Every response is a draw of the policy's law at the trainer's temperature, top-k, top-p and min-p, and a function of
    the weights, `args.seed` and its place in the run (step, rank, row) alone: speculation, batch mates and a resume
    change nothing.

    Args:
        heads: "learn" starts untrained heads that learn from the first rollouts; a folder, or heads, uses those; None
            decodes without speculation. Heads that are given are taught in place (untrained ones at once).
        proposers: what proposes, separated by commas: "heads", "suffix", or a class of your own as "module:Class".
        engine_config: how many responses run at once.
        budget: how many nodes a round may verify, and whether Reflex corrects what is proposed.
        slow: whether heads that got worse for good are taught again, and how much time that may take. Off, heads that
            begin untrained learn at first all the same, and given ones stay as they are.

    The trainer's logs gain `specroll/tokens_per_second`, `specroll/tokens_per_round` and `specroll/acceptance`; where
    proposals were verified `specroll/acceptance_1`, `_2`, ...: the share of sequences, over the rounds that verified
    any, whose next 1, 2, ... tokens were all drawn as proposed; where heads propose `specroll/reflex_open` (1 while
    Reflex corrects them, 0 while its gate is shut) and what else it measures, and `specroll/alarm` (1 while hardly
    anything that they propose is accepted, see `engine.alarm`); where heads have learned `specroll/learning_seconds`
    and `specroll/heads_version`; and where they were watched those of `SlowPath.measures` (docs/commands.md). Where
    anything proposes, `specroll/proposer_faults` counts how often that has failed in the run (`guard`).
    """

    def __init__(
        self,
        heads: Heads = "learn",
        *,
        proposers: str = PROPOSERS,
        engine_config: EngineConfig = EngineConfig(),
        budget: BudgetConfig = BudgetConfig(),
        slow: SlowConfig = SlowConfig(),
    ) -> None:
        self.engine_config, self.budget = engine_config, budget
        self.proposers: InRun = Proposers(proposer_names(proposers), heads, budget, slow)
        self.engine: Engine | None = None
        self.latest: Rollout | None = None
        """What came of the latest call."""
        self.seconds = 0.0
        """Wall time of all rollouts so far, without what the heads' learning took."""
        self.policy_version: dict[Mode, int] = {}
        """Global step at the latest rollout of each mode."""
        self.faults = 0
        """How often what proposes has failed in this run, on this rank."""
        self._calls: dict[Mode, tuple[int, int]] = {}
        self._checkpoint: Path | None = None

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Sample one response to each prompt, in order.

        Returns `prompt_ids`, `completion_ids` (an EOS is kept as the last id) and `logprobs`: log p of each token at
        the trainer's temperature without truncation, which is what the trainer itself computes.
        Raises `ValueError` for settings that cannot be kept exactly and for prompts that do not fit.
        """
        mode: Mode = "train" if trainer.model and trainer.model.training else "eval"
        sampling, stop = sampling_of(trainer)
        engine = self.engine_of(trainer)
        prompt_ids = tokenize(prompts, trainer)
        check_fit(prompt_ids, trainer, getattr(engine.target.config, "max_position_embeddings", None))
        samples = self._samples(mode, trainer, len(prompts))
        args: Any = trainer.args
        limit = int(args.max_completion_length or 0)
        requests = [
            Request(prompt_ids=tuple(ids), sample=sample, max_new_tokens=limit)
            for ids, sample in zip(prompt_ids, samples, strict=True)
        ]
        started = time.perf_counter()
        record = self.proposers.record(engine) if mode == "train" else None
        rollout = engine.generate(requests, sampling, stop=stop, on_trajectory=record)
        engine.target.release()
        self.seconds += time.perf_counter() - started
        self.latest = rollout
        self.faults += rollout.faults
        _log(rollout, engine, trainer, mode, self.faults)
        measures = self.proposers.measures()
        if engine.proposer is not None:
            measures["alarm"] = float(engine.alarm.raised)
        if mode == "train":
            measures |= self.proposers.learn(engine, rollout)
        for name, value in measures.items():
            trainer._metrics[mode][f"specroll/{name}"].append(value)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [c.token_ids for c in rollout.completions],
            "logprobs": [tempered_logps(c) for c in rollout.completions],
        }

    @property
    def learner(self) -> SlowPath | None:
        """Teaches the heads; None where there are none, or none that may change."""
        return self.proposers.learner

    def check(self, trainer: GRPOTrainer) -> None:
        """Raise ValueError for a trainer whose settings cannot be kept exactly."""
        sampling_of(trainer)
        unwrapped(trainer)

    def save(self, folder: str | Path) -> None:
        """Keep what the proposers have learned in `folder`, a checkpoint."""
        if self.engine is not None:
            self.proposers.save(Path(folder), self.engine)

    def restore(self, folder: str | Path) -> None:
        """Go on with what `save` left in `folder`; without anything there, as if new."""
        self._checkpoint = Path(folder)
        self.engine = None

    def engine_of(self, trainer: GRPOTrainer) -> Engine:
        """The engine on the trainer's present model, made at the first rollout, told which policy it now runs."""
        model = unwrapped(trainer)
        if self.engine is None or self.engine.target.model is not model:
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            self.engine = Engine(
                model, tokenizer, config=self.engine_config, budget=self.budget, eos_ids=trainer.eos_token_ids
            )
            self.proposers.start(self.engine, tokenizer, self._checkpoint)
        step = trainer.state.global_step
        if step != self.engine.policy_version:
            self.proposers.policy_moved(self.engine)
        self.engine.policy_version = step
        return self.engine

    def _samples(self, mode: Mode, trainer: GRPOTrainer, rows: int) -> list[int]:
        """Names of this call's samples. Each step counts its calls from 0, so a resumed run draws the same ones."""
        step = trainer.state.global_step
        last_step, calls = self._calls.get(mode, (step, 0))
        call = calls if step == last_step else 0
        self._calls[mode] = (step, call + 1)
        self.policy_version[mode] = step
        rank = trainer.accelerator.process_index
        return [sample_name(eval=mode == "eval", step=step, call=call, rank=rank, row=row) for row in range(rows)]


def sample_name(*, eval: bool, step: int, call: int, rank: int, row: int) -> int:
    """One int64 for each response of a run, so that no two share their noise.

    Raises ValueError where a part does not fit its bits: more than 4 million steps, 65,536 rollouts within a step,
    1,024 ranks or 16,384 responses of a rank in one rollout.
    """
    name = 0
    parts = {
        "eval": (int(eval), _EVAL),
        "step": (step, _STEP),
        "call": (call, _CALL),
        "rank": (rank, _RANK),
        "row": (row, _ROW),
    }
    for part, (value, bits) in parts.items():
        if not 0 <= value < 1 << bits:
            raise ValueError(
                f"the rollout's {part} is {value}, but samples can be told apart only up to {(1 << bits) - 1}: "
                "use a smaller batch (or fewer steps) per run"
            )
        name = name << bits | value
    return name


def tempered_logps(completion: Completion) -> list[float]:
    """log p of each token at the temperature, untruncated: what the trainer computes from logits / temperature."""
    return [logp + math.log(kept) for logp, kept in zip(completion.logp, completion.kept_mass, strict=True)]


def _log(rollout: Rollout, engine: Engine, trainer: GRPOTrainer, mode: Mode, faults: int) -> None:
    """Add the rollout of all ranks, and the faults of this rank's proposer so far, to what the trainer logs next."""
    rounds, proposer = rollout.rounds, engine.proposer
    speculative = [r for r in rounds if r.proposed]
    deepest = max((len(r.accepted_by_depth) for r in speculative), default=0)
    horizons = 0 if proposer is None else proposer.horizons or deepest
    totals = [
        rollout.tokens,
        rollout.seconds,
        sum(r.running for r in rounds),
        sum(r.emitted for r in rounds),
        sum(r.proposed for r in rounds),
        sum(sum(r.accepted_by_depth) for r in rounds),
        sum(r.running for r in speculative),
        faults,
        *(sum(sum(r.accepted_by_depth[k : k + 1]) for r in speculative) for k in range(horizons)),
    ]
    own = torch.tensor([totals], dtype=torch.float32, device=trainer.accelerator.device)
    # Heads may begin to propose on one rank before another, which then has no horizons yet.
    per_rank = trainer.accelerator.gather(pad_across_processes(own, dim=1))
    sums = per_rank.sum(0).tolist()  # type: ignore[union-attr]
    tokens, _, turns, emitted, proposed, accepted, tried, failed, *by_horizon = sums
    metrics = trainer._metrics[mode]
    metrics["specroll/tokens_per_second"].append(tokens / per_rank[:, 1].max().item())  # type: ignore[index]
    metrics["specroll/tokens_per_round"].append(emitted / turns if turns else 1.0)
    metrics["specroll/acceptance"].append(accepted / proposed if proposed else 0.0)
    if proposer is not None:
        metrics["specroll/proposer_faults"].append(failed)
    if tried:
        for k, reached in enumerate(by_horizon, 1):
            metrics[f"specroll/acceptance_{k}"].append(reached / tried)
