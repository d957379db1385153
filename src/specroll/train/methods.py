"""What samples in a training: from a method's name and the settings of all of them to the trainer's `rollout_func`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specroll.config import (
    METHOD,
    PROPOSERS,
    BudgetConfig,
    EngineConfig,
    MethodName,
    SlowConfig,
    TrainConfig,
    check_method,
)
from specroll.engine import Engine
from specroll.rivals.settings import FastGRPOConfig
from specroll.slow.path import SlowPath
from specroll.train.hf_rollout import HFRollout
from specroll.train.proposers import Heads
from specroll.train.rival import Rival
from specroll.train.rollout import Mode, SpecRollout

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Sampler(Protocol):
    """A `rollout_func`, and what the trainer wants to know of it."""

    seconds: float
    """Wall time of all rollouts so far, without what learning took."""
    policy_version: dict[Mode, int]
    """Global step at the latest rollout of each mode."""

    @property
    def engine(self) -> Engine | None: ...

    @property
    def learner(self) -> SlowPath | None: ...

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Any]: ...

    def check(self, trainer: GRPOTrainer) -> None:
        """Raise ValueError for a trainer that it cannot sample for."""
        ...

    def save(self, folder: str | Path) -> None: ...

    def restore(self, folder: str | Path) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutSettings:
    """The settings of `SpecRollGRPOTrainer` that concern its rollouts; each method uses some of them."""

    heads: Heads = "learn"
    proposers: str = PROPOSERS
    engine_config: EngineConfig = EngineConfig()
    budget: BudgetConfig = BudgetConfig()
    slow: SlowConfig = SlowConfig()
    drafter: str | Path | None = None
    """Folder of a drafter that the rival begins with [an untrained one]."""
    rival: FastGRPOConfig = FastGRPOConfig()

    @classmethod
    def of(cls, config: TrainConfig) -> RolloutSettings:
        return cls(
            heads=None if config.heads == "none" else config.heads,
            proposers=config.proposers or PROPOSERS,
            budget=BudgetConfig(max_nodes=config.max_nodes, rule=config.budget, reflex=config.reflex),
            slow=SlowConfig(slow=config.slow, slow_share=config.slow_share),
            drafter=config.drafter,
        )


def described(config: TrainConfig) -> str:
    """What samples in a run, in a few words."""
    if config.method not in (None, METHOD):
        return f"method: {config.method}"
    names = config.proposers or PROPOSERS
    return f"heads: {config.heads}" if names == PROPOSERS else f"proposers: {names}"


def _fastgrpo(settings: RolloutSettings) -> Sampler:
    rollout = SpecRollout(None, engine_config=settings.engine_config)
    rollout.proposers = Rival(settings.drafter, settings.rival)
    return rollout


_METHODS: Mapping[MethodName, Callable[[RolloutSettings], Sampler]] = {
    "specroll": lambda settings: SpecRollout(
        settings.heads,
        proposers=settings.proposers,
        engine_config=settings.engine_config,
        budget=settings.budget,
        slow=settings.slow,
    ),
    "plain": lambda settings: SpecRollout(None, engine_config=settings.engine_config),
    "hf": lambda settings: HFRollout(),
    "fastgrpo": _fastgrpo,
}


def sampler(settings: RolloutSettings, method: MethodName = METHOD) -> Sampler:
    """What a trainer of this method samples with. Raises ValueError for settings that the method has no use for."""
    check_method(settings, method, settings.proposers)
    return _METHODS[method](settings)
