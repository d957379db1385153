"""`specroll bench methods`: one GRPO training sampled by several methods in turn, step by step.

The contest is `adapt`'s: methods of our engine sample the same tokens, so one training serves them all. Here it goes
more than once over the same few prompts, for proposers that remember them. Knows trainings; `methods_stats` sums up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from specroll.bench.adapt import Experiment
from specroll.bench.adapt import train as train_contest
from specroll.config import PROPOSERS, BudgetConfig, EngineConfig, MethodName, TrainConfig
from specroll.propose.store import load_heads
from specroll.rivals.settings import FastGRPOConfig
from specroll.train.data import Task
from specroll.train.methods import RolloutSettings, sampler
from specroll.train.rollout import SpecRollout
from specroll.train.run import rows_in_order

SYSTEMS: Mapping[str, tuple[MethodName, str]] = {
    "heads": ("specroll", "heads"),
    "suffix": ("specroll", "suffix"),
    "specroll": ("specroll", "heads,suffix"),
    "fastgrpo": ("fastgrpo", PROPOSERS),
}
"""What can be measured besides plain decoding: the method of each, and what proposes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a training is of, but for its seed."""

    model: str
    heads: str
    data: str
    top_p: float
    batch: str
    drafter: str | None = None
    """Folder of the rival's drafter, where that is measured."""

    @property
    def prompts(self) -> int:
        return int(self.batch.split("x")[0])

    @property
    def generations(self) -> int:
        return int(self.batch.split("x")[1])

    @property
    def running(self) -> int:
        return self.prompts * self.generations

    @property
    def name(self) -> str:
        return f"{self.model} {self.data} top_p={self.top_p} {self.batch}"


def train(
    setting: Setting,
    config: TrainConfig,
    task: Task,
    methods: Sequence[str],
    *,
    rival: FastGRPOConfig = FastGRPOConfig(),
    epochs: int,
    seed: int,
    on_step: Callable[[dict[str, Any]], None],
) -> None:
    """A training of `config.steps` steps, in `epochs` passes over its prompts, sampled by `methods` and plain decoding.

    The rival is run with the settings `rival`. `on_step` gets a record of each step, as of `adapt.train`, with its
    `epoch` from 0. Raises ValueError for a method
    that is not there, and where one samples other tokens than plain decoding.
    """
    assert config.steps is not None
    per_epoch = config.steps // epochs
    rows = rows_in_order(task.dataset, per_epoch * setting.prompts, seed)

    def rivals(model: PreTrainedModel, config: TrainConfig, running: int) -> dict[str, SpecRollout]:
        return {name: system(name, setting, model, config, rival, running) for name in methods if name != "plain"}

    train_contest(
        Experiment(
            config=config,
            task=replace(task, dataset=rows),
            running=setting.running,
            rivals=rivals,
        ),
        seed,
        lambda step: on_step({**step, "epoch": step["step"] // per_epoch}),
    )


def system(
    name: str, setting: Setting, model: PreTrainedModel, config: TrainConfig, rival: FastGRPOConfig, running: int
) -> SpecRollout:
    """One of `SYSTEMS`, with heads or a drafter of its own where it has any, which learn as the method says."""
    method, proposers = SYSTEMS[name]
    settings = RolloutSettings(proposers=proposers, engine_config=EngineConfig(max_running=running))
    if method == "specroll":  # the rival has a rule of its own
        settings = replace(settings, budget=BudgetConfig(max_nodes=config.max_nodes))
        if "heads" in proposers:
            settings = replace(settings, heads=load_heads(setting.heads, model))  # read anew, as each learns
    else:
        settings = replace(settings, drafter=setting.drafter, rival=rival)
    made = sampler(settings, method)
    assert isinstance(made, SpecRollout)
    return made
