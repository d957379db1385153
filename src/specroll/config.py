"""Settings, one small section per room, with the defaults of engine, heads, budget and training.

Imports nothing of specroll.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

BudgetRuleName = Literal["optimal", "paper"]
ReflexName = Literal["associative", "hidden", "off"]
SlowName = Literal["on", "off"]
HeadsSee = Literal["path", "root", "state"]
MethodName = Literal["specroll", "plain", "hf", "fastgrpo"]

METHOD: MethodName = "specroll"
PROPOSERS = "heads"
BUILT_IN_PROPOSERS = ("heads", "suffix")


def _at_least(least: int, **values: int | None) -> None:
    """Raise ValueError for a setting below `least`, or for one that is no whole number; None is left to its default."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _known_rule(rule: str) -> None:
    if rule not in get_args(BudgetRuleName):
        raise ValueError(f"a budget's rule is one of {', '.join(get_args(BudgetRuleName))}, got {rule!r}")


def check_reflex(reflex: str) -> None:
    """Raise ValueError for a form of Reflex that does not exist."""
    if reflex not in get_args(ReflexName):
        raise ValueError(f"reflex is one of {', '.join(get_args(ReflexName))}, got {reflex!r}")


def _check_slow(slow: str, share: float) -> None:
    if slow not in get_args(SlowName):
        raise ValueError(f"slow is one of {', '.join(get_args(SlowName))}, got {slow!r}")
    if not 0.0 < share < 1.0:
        raise ValueError(f"slow_share must be a part of the rollouts' time, above 0 and below 1, got {share}")


def is_import_path(proposer: str) -> bool:
    """Whether a proposer is named by `module:Class`, and not one of ours."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", proposer) is not None


def proposer_names(text: str) -> tuple[str, ...]:
    """The proposers that `heads,my_module:PhraseList` names. Raises ValueError for what names none, or one twice."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in BUILT_IN_PROPOSERS and not is_import_path(name):
            raise ValueError(
                f"proposers are {', '.join(BUILT_IN_PROPOSERS)}, or your own class as module:Class, separated by "
                f"commas; got {name!r}"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"proposers names one twice: {text!r}")
    return names


# What a setting of speculation is good for. Settings that are not named here serve every method.
_OF_HEADS = frozenset({"heads", "reflex", "slow", "slow_share"})
_OF_SPECULATION = _OF_HEADS | {"proposers", "max_nodes", "budget"}
_OF_ENGINE = frozenset({"engine_config", "demo"})
_OF_RIVAL = frozenset({"drafter", "rival"})
_USED: dict[str, frozenset[str]] = {
    "specroll": _OF_SPECULATION | _OF_ENGINE,
    "plain": _OF_ENGINE,
    "hf": frozenset(),
    "fastgrpo": _OF_ENGINE | _OF_RIVAL,
}


def check_method(settings: Any, method: str, proposers: str | None) -> None:
    """Raise ValueError for a method or proposers that do not exist, and for settings that they have no use for.

    `settings` is the dataclass that holds them; what is as by default in it counts as not given.
    """
    if method not in get_args(MethodName):
        raise ValueError(f"method is one of {', '.join(get_args(MethodName))}, got {method!r}")
    names = proposer_names(PROPOSERS if proposers is None else proposers)
    given = {field.name for field in fields(settings) if getattr(settings, field.name) != field.default}
    if unused := given & ((_OF_SPECULATION | _OF_ENGINE | _OF_RIVAL) - _USED[method]):
        raise ValueError(f"the method {method} has no use for {', '.join(sorted(unused))}: leave it out")
    if "heads" in names and len(names) > 1 and settings.heads in (None, "none"):
        raise ValueError(
            f"heads=none leaves heads out, but proposers={proposers!r} names them: leave one of the two out"
        )
    if "heads" not in names and (unused := given & _OF_HEADS):
        raise ValueError(
            f"{', '.join(sorted(unused))} is for heads, which proposers={proposers!r} leaves out: name heads there, or "
            "leave it out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How many sequences run at once, and how long they may get."""

    max_running: int = 64
    """Slots: sequences that are decoded together. The rest wait and take a slot as soon as one is free."""
    prefill_tokens: int = 2048
    """Most prompt tokens that one prefill pass packs."""

    def __post_init__(self) -> None:
        _at_least(1, max_running=self.max_running, prefill_tokens=self.prefill_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """The future-token heads."""

    horizons: int = 4
    sees: HeadsSee = "path"
    """What a head knows besides the state: the drafted path up to it, its root only, or nothing (the paper's heads)."""
    width_factor: int = 2
    """Width of a head's hidden layer, in units of the model's hidden width."""

    @property
    def blocks(self) -> int:
        """Sets of weights: one that all steps along the path share, else one for each horizon."""
        return 1 if self.sees == "path" else self.horizons

    def __post_init__(self) -> None:
        _at_least(1, horizons=self.horizons, width_factor=self.width_factor)
        if self.sees not in get_args(HeadsSee):
            raise ValueError(f"heads see {', '.join(get_args(HeadsSee))}; got sees={self.sees!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How many nodes a round may verify per sequence."""

    max_nodes: int = 16
    """Most nodes per sequence (the root is not counted). 0 is plain decoding."""
    rule: BudgetRuleName = "optimal"
    """optimal: as many nodes as pay in this round, none included; paper: C_hw / S nodes for every sequence, always."""
    fixed_nodes: int | None = None
    """Verify exactly so many nodes per sequence in every round, whether it pays or not (for measurements)."""
    ranking: Literal["noise", "probability"] = "noise"
    """Rank candidates by s log q + g, with the noise g that the target will use, or by q alone."""

    reflex: ReflexName = "associative"
    """associative: the trajectory's own tokens correct what heads propose next; hidden: its past errors move the heads'
    states (the published form); off: heads alone."""

    def __post_init__(self) -> None:
        _at_least(0, max_nodes=self.max_nodes, fixed_nodes=self.fixed_nodes)
        _known_rule(self.rule)
        check_reflex(self.reflex)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowConfig:
    """The slow path: heads that got worse for good are taught again, between rollouts."""

    slow: SlowName = "on"
    """on: heads are watched and taught again; off: heads stay as they are once they have learned."""
    slow_share: float = 0.02
    """Most of the rollouts' time that it may take, recording included; the first learning is not counted."""

    def __post_init__(self) -> None:
        _check_slow(self.slow, self.slow_share)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run. The defaults are the demo's: a 135M model learns one-digit sums on two CPU cores."""

    model: str | None = None
    """A local folder or a name on the hub [the default model, SmolLM2-135M-Instruct]."""
    task: str = "chain_sum"
    """A reasoning-gym task, gsm8k, math35, dapo17k, or a .jsonl file with question and answer."""
    data_dir: Path | None = None
    """Where published data sets lie as JSON Lines."""
    steps: int | None = None
    """Optimizer steps [200; the demo's own number with --demo]."""
    num_generations: int = 8
    """Responses per prompt (the group)."""
    prompts_per_step: int = 2
    """Prompts per optimizer step."""
    micro_batch: int | None = None
    """Responses per forward and backward pass [all of a step]."""
    max_completion: int = 40
    """Most tokens of a response."""
    temperature: float = 1.0
    """Of the law that responses are drawn from."""
    top_p: float = 0.95
    """Of the law that responses are drawn from; 1 is off."""
    learning_rate: float = 3e-4
    """Constant over the run."""
    lora_rank: int = 16
    """LoRA on all linear layers, alpha twice the rank; 0 trains all weights."""
    beta: float = 0.0
    """Weight of the divergence from the starting model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto is bfloat16 where the device has units for it."""
    method: MethodName | None = None
    """What samples: specroll, speculation; plain, the same engine without it; hf, transformers' own generate as TRL
    calls it; fastgrpo, the rival's drafter [specroll]."""
    proposers: str | None = None
    """What proposes, separated by commas: heads, suffix, or a class of your own as module:Class [heads]."""
    heads: str = "learn"
    """learn: untrained heads that learn from the first rollouts; none: no speculation; or a folder of fitted heads."""
    drafter: str | None = None
    """Folder of the rival's drafter, as `specroll drafter fit` writes it, for fastgrpo [an untrained one]."""
    max_nodes: int = 16
    """Most tokens proposed per response and round."""
    budget: BudgetRuleName = "optimal"
    """How many of them are verified: optimal, as many as pay in each round; paper, the published rule (a baseline)."""
    reflex: ReflexName = "associative"
    """associative: what a response holds already corrects what heads propose for it; hidden: its past errors move the
    heads' states (the published form); off: heads alone."""
    slow: SlowName = "on"
    """on: heads that got worse for good are taught again between rollouts; off: heads stay as they are once learned."""
    slow_share: float = 0.02
    """Most of the rollouts' time that watching heads and teaching them again may take: how often that can happen."""
    save_every: int = 20
    """Steps between checkpoints."""
    output: Path | None = None
    """Folder of the run [runs/TASK-TIME]."""
    seed: int = 0
    """Of the data's order and of every draw."""
    demo: bool = False
    """Evaluate before and after, measure the speed with and without speculation, and end with a table."""

    def __post_init__(self) -> None:
        _at_least(
            1,
            num_generations=self.num_generations,
            prompts_per_step=self.prompts_per_step,
            max_completion=self.max_completion,
            save_every=self.save_every,
            steps=self.steps,
            micro_batch=self.micro_batch,
        )
        _at_least(0, lora_rank=self.lora_rank, max_nodes=self.max_nodes, seed=self.seed)
        _known_rule(self.budget)
        check_reflex(self.reflex)
        _check_slow(self.slow, self.slow_share)
        check_method(self, self.method or METHOD, self.proposers)
        if self.num_generations < 2:
            raise ValueError("num_generations must be at least 2: GRPO compares the responses of a group")
        if self.seed >= 1 << 32:
            raise ValueError(f"seed must be below 2**32, got {self.seed}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta must be >= 0 (0 leaves the divergence out), got {self.beta}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 is off), got {self.top_p}")
        if self.demo and self.task.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError("demo evaluates on held-out questions, and a file of one's own has none: leave --demo out")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be > 0 to train (all responses would be equal), got {self.temperature}")
        if self.micro_batch is not None and self.responses % self.micro_batch:
            raise ValueError(
                f"micro_batch must divide the {self.responses} responses of a step "
                f"({self.prompts_per_step} prompts x {self.num_generations}), got {self.micro_batch}"
            )

    @property
    def responses(self) -> int:
        """Responses per optimizer step."""
        return self.num_generations * self.prompts_per_step
