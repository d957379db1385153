"""TRL's GRPOTrainer with speculative rollouts: one changed line in a training script.

    trainer = SpecRollGRPOTrainer(model, reward_funcs=..., args=..., train_dataset=...)

Knows the trainer's loss only as far as is needed to measure how far the rollout's log-probabilities are from the
trainer's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from specroll.config import METHOD, PROPOSERS, BudgetConfig, EngineConfig, MethodName, SlowConfig
from specroll.rivals.settings import FastGRPOConfig
from specroll.train.callback import InCheckpoints
from specroll.train.methods import RolloutSettings, sampler
from specroll.train.proposers import Heads
from specroll.train.rollout import Mode


class SpecRollGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose responses come from specroll's engine; all of its arguments, and eight more.

    Args:
        method: what samples. "specroll" (default) speculates; "plain" is the same engine without proposals; "hf" is
            transformers' own generate as TRL calls it, with the same timings in the logs; "fastgrpo" is the rival's
            drafter and rule in the same engine. Arguments that a method has no use for are refused.
        proposers: what proposes, separated by commas: "heads" (default), "suffix", or a class of your own as
            "module:Class".
        heads: "learn" (default) starts untrained heads that learn from the first rollouts and are kept in the
            checkpoints; a folder of fitted heads, or heads, uses those; None decodes without speculation.
        engine_config: how many responses run at once.
        budget: how many nodes a round may verify, and whether Reflex corrects what is proposed.
        slow: whether heads that got worse for good are taught again, and how much time that may take.
        drafter: the folder of one that "fastgrpo" begins with (`specroll drafter fit`); by default it is untrained.
        rival: what "fastgrpo" is run with.

    Beside those of the method (see `SpecRollout`), the logs gain `specroll/generation_share` (of `step_time`), and
    `specroll/logp_gap_mean` and `specroll/logp_gap_max`: |log p(rollout) - log p(trainer)| over completion tokens,
    while the weights are those of the rollout, if it tells log-probabilities.
    """

    def __init__(
        self,
        *args: Any,
        method: MethodName = METHOD,
        proposers: str = PROPOSERS,
        heads: Heads = "learn",
        engine_config: EngineConfig = EngineConfig(),
        budget: BudgetConfig = BudgetConfig(),
        slow: SlowConfig = SlowConfig(),
        drafter: str | Path | None = None,
        rival: FastGRPOConfig = FastGRPOConfig(),
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("rollout_func", None) is not None:
            raise ValueError("this trainer brings its own rollout_func; pass yours to trl.GRPOTrainer instead")
        settings = RolloutSettings(
            heads=heads,
            proposers=proposers,
            engine_config=engine_config,
            budget=budget,
            slow=slow,
            drafter=drafter,
            rival=rival,
        )
        self.rollout = sampler(settings, method)
        self._sampled: tuple[Tensor, Tensor] | None = None
        self._generation_seconds = 0.0
        self._gap_totals: dict[str, tuple[float, float]] = {}
        with _without_experimental_warning():
            super().__init__(*args, rollout_func=self.rollout, **kwargs)
        self.rollout.check(self)
        self.add_callback(InCheckpoints(self.rollout))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        before = self.rollout.seconds
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.rollout.policy_version:
            raise RuntimeError(
                "the trainer did not call its rollout_func. Is trl.GRPOTrainer patched (Unsloth's ignores it)?"
            )
        self._generation_seconds += self.rollout.seconds - before
        if self._step % self.current_gradient_accumulation_steps == 0:
            metrics = self._metrics["train"]
            metrics["specroll/generation_share"].append(self._generation_seconds / metrics["step_time"][-1])
            self._generation_seconds = 0.0
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        mode: Mode = "train" if self.model and self.model.training else "eval"
        on_policy = self.rollout.policy_version.get(mode) == self.state.global_step
        logp_ST = inputs.get("sampling_per_token_logps") if on_policy else None
        self._sampled = None if logp_ST is None else (logp_ST, inputs["completion_mask"])
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._sampled = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._sampled is not None:
            self._note_gap(output[0].detach(), *self._sampled)
        return output

    def _note_gap(self, logp_ST: Tensor, sampled_logp_ST: Tensor, mask_ST: Tensor) -> None:
        """Add |log p(rollout) - log p(trainer)| of the completion tokens, of all ranks, to what is logged next."""
        gap_ST = torch.where(mask_ST.bool(), (logp_ST.float() - sampled_logp_ST.float()).abs(), 0.0)
        local = torch.stack((gap_ST.sum(), mask_ST.sum().float(), gap_ST.max()))
        per_rank: Any = self.accelerator.gather(local[None])
        total, count = per_rank[:, 0].sum().item(), per_rank[:, 1].sum().item()
        mode = "train" if self.model and self.model.training else "eval"
        metrics = self._metrics[mode]
        # The trainer averages each list when it logs: one value, kept up to date, is a token's mean and a true maximum.
        if known := metrics["specroll/logp_gap_max"]:
            total, count = total + self._gap_totals[mode][0], count + self._gap_totals[mode][1]
        self._gap_totals[mode] = (total, count)
        metrics["specroll/logp_gap_mean"] = [total / max(count, 1.0)]
        metrics["specroll/logp_gap_max"] = [max([per_rank[:, 2].max().item(), *known])]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.rollout.restore(checkpoint)


@contextmanager
def _without_experimental_warning() -> Iterator[None]:
    """TRL calls `rollout_func` experimental; that this package follows its changes is our matter, not our users'."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'", category=UserWarning)
        yield
