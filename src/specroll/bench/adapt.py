"""One GRPO training whose every step is sampled five times: by plain decoding, and by heads with Reflex and the slow
path, with either and with neither.

What is sampled does not depend on what proposes, so one training serves all systems. In each step all of them sample
the same requests with the same noise, in an order that changes from step to step, and the trainer learns from plain
decoding's. Each has heads, a Reflex and a slow path of its own for the whole run, as a training of its own would have.
They share the model, its slots and its packed weights. Knows trainings and engines; sums nothing up.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from specroll.bench.compare import order
from specroll.bench.same import differing
from specroll.config import BudgetConfig, EngineConfig, ReflexName, SlowConfig, SlowName, TrainConfig
from specroll.engine import Engine
from specroll.model.load import load_model
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.propose.store import load_heads
from specroll.train.data import Task
from specroll.train.rollout import SpecRollout, sample_name
from specroll.train.run import arguments, lora
from specroll.train.shift import in_turn, take_weights
from specroll.train.terms import sampling_of, tokenize
from specroll.train.trainer import SpecRollGRPOTrainer
from specroll.types import Request

REFLEX: ReflexName = BudgetConfig().reflex
SETTINGS: dict[str, tuple[ReflexName, SlowName]] = {
    "heads": ("off", "off"),
    "heads+reflex": (REFLEX, "off"),
    "heads+slow": ("off", "on"),
    "full": (REFLEX, "on"),
}
"""The systems besides plain decoding."""
WARM_UP_TOKENS = 4
_MEASURES = ("reflex_open", "alarm", "drift_score", "regret", "triggers", "refresh_kept", "heads_version")

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shift:
    """From `step` (the first is 0) the policy goes on with the weights of `model`, on prompts of `task`."""

    step: int
    model: PreTrainedModel
    task: Task


Rivals = Callable[[PreTrainedModel, TrainConfig, int], Mapping[str, SpecRollout]]
"""(model, training, responses decoded together) -> the systems besides plain decoding."""


def ablation(model: PreTrainedModel, config: TrainConfig, running: int) -> dict[str, SpecRollout]:
    """Those of `SETTINGS`, with the heads in the folder that the training names."""
    return systems(load_heads(config.heads, model), config, running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """`config` is that of the training; its `steps` are given. `rivals` are made anew for each training."""

    config: TrainConfig
    task: Task
    running: int
    shift: Shift | None = None
    rivals: Rivals = ablation

    @property
    def steps(self) -> int:
        assert self.config.steps is not None
        return self.config.steps

    @property
    def phases(self) -> list[tuple[Task, int]]:
        """Tasks and how many of their prompts are used, in turn."""
        parts = [(self.task, self.steps)]
        if self.shift is not None:
            parts = [(self.task, self.shift.step), (self.shift.task, self.steps - self.shift.step)]
        return [(task, steps * self.config.prompts_per_step) for task, steps in parts]


def train(experiment: Experiment, seed: int, on_step: Callable[[Record], None]) -> None:
    """The whole training with this seed; `on_step` gets a record of each step as it ends.

    Raises ValueError where a system samples other tokens than plain decoding.
    """
    config = replace(experiment.config, seed=seed)
    model, tokenizer = load_model(config.model, dtype=config.dtype)
    rivals = experiment.rivals(model, config, experiment.running)
    dataset, reward = in_turn(experiment.phases, seed)
    with TemporaryDirectory() as scratch:
        args: Any = arguments(config, experiment.steps, Path(scratch), model.dtype)
        args.save_strategy = "no"
        trainer: Any = SpecRollGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=lora(config.lora_rank),
            heads=None,
            engine_config=EngineConfig(max_running=experiment.running),
        )
        contest = Contest(
            {"plain": trainer.rollout, **rivals}, exact=model.dtype == torch.float32, shift=experiment.shift
        )
        trainer.rollout_func = contest
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Steps(contest, on_step))
        trainer.train()


def systems(heads: FutureHeads, config: TrainConfig, running: int) -> dict[str, SpecRollout]:
    """Those of `SETTINGS`, each with a copy of the heads."""
    return {
        name: SpecRollout(
            copy.deepcopy(heads),
            engine_config=EngineConfig(max_running=running),
            budget=BudgetConfig(max_nodes=config.max_nodes, reflex=reflex),
            slow=SlowConfig(slow=slow, slow_share=config.slow_share),
        )
        for name, (reflex, slow) in SETTINGS.items()
    }


class Contest:
    """A trainer's `rollout_func` that lets every system sample and gives the trainer what "plain" sampled.

    `step` is what is known of the latest step. By system: `seconds` of the rollout, `recording` among them, `learning`
    after it (watching heads and teaching them), `tokens` in all, `turns` (rounds times the sequences that ran in them),
    `emitted` by these, `proposed` nodes and those `accepted`, samples that are `differing` from plain decoding's, and
    those of the training logs' measures that there were.
    """

    def __init__(self, systems: Mapping[str, SpecRollout], *, exact: bool, shift: Shift | None = None) -> None:
        """`exact`: whether tokens other than plain decoding's, rounding aside, end it."""
        self.systems, self.exact, self.shift = dict(systems), exact, shift
        self.seconds = 0.0
        """Of the trainer's time, what went into this."""
        self.step: Record = {}
        self._asides: dict[str, Any] = {}

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        started = time.perf_counter()
        step = trainer.state.global_step
        if not self._asides:
            self._begin(prompts, trainer)
        if self.shift is not None and step == self.shift.step:
            self._change(self.shift.model)
        turns = order(list(self.systems), step)
        sampled = {name: self._sample(name, prompts) for name in turns}
        self._compare(sampled, trainer)
        self.step = {
            "step": step,
            "shifted": self.shift is not None and step >= self.shift.step,
            "order": turns,
            "systems": {name: sampled[name][1] for name in self.systems},
        }
        self.seconds += time.perf_counter() - started
        return sampled["plain"][0]

    def _begin(self, prompts: Sequence[Any], trainer: Any) -> None:
        """Engines on one target, and what each of them does once, before anything is timed."""
        self._asides = {name: _Aside(trainer) for name in self.systems}
        engines = [system.engine_of(self._asides[name]) for name, system in self.systems.items()]
        sampling, _ = sampling_of(trainer)
        requests = [
            Request(
                prompt_ids=tuple(ids),
                sample=sample_name(eval=True, step=0, call=0, rank=0, row=row),
                max_new_tokens=WARM_UP_TOKENS,
            )
            for row, ids in enumerate(tokenize(prompts, trainer))
        ]
        for engine in engines:
            engine.target = engines[0].target
            engine.generate(requests, sampling)
            engine.history.forget()
        engines[0].target.release()

    def _change(self, model: PreTrainedModel) -> None:
        engines: list[Engine] = [system.engine for system in self.systems.values() if system.engine is not None]
        target = engines[0].target
        if take_weights(target.model, model):
            for engine in engines:
                if isinstance(engine.proposer, HeadsProposer):
                    engine.proposer.refresh()
        with target.rolling_out():
            pass  # weights are packed anew now, and not in the first rollout that is timed

    def _sample(self, name: str, prompts: Sequence[Any]) -> tuple[dict[str, list[Any]], Record]:
        """What the system gives the trainer, and what is noted of it."""
        system, aside = self.systems[name], self._asides[name]
        learned = system.proposers.learning_seconds
        output = system(prompts, aside)
        rollout = system.latest
        assert rollout is not None
        rounds = rollout.rounds
        noted: Record = {
            "seconds": rollout.seconds,
            "recording": rollout.recording_seconds,
            "learning": system.proposers.learning_seconds - learned,
            "tokens": rollout.tokens,
            "turns": sum(r.running for r in rounds),
            "emitted": sum(r.emitted for r in rounds),
            "proposed": sum(r.proposed for r in rounds),
            "accepted": sum(sum(r.accepted_by_depth) for r in rounds),
        }
        logs = aside.take()
        noted |= {key: logs[key] for key in _MEASURES if key in logs}
        return output, {key: round(value, 6) for key, value in noted.items()}

    def _compare(self, sampled: Mapping[str, tuple[dict[str, list[Any]], Record]], trainer: Any) -> None:
        sampling, _ = sampling_of(trainer)
        latest = {name: system.latest.completions for name, system in self.systems.items() if system.latest is not None}
        for name, (output, noted) in sampled.items():
            noted["differing"] = differing(
                name, latest["plain"], latest[name], output["prompt_ids"], sampling, exact=self.exact
            )


class _Aside:
    """The trainer as a system's rollout sees it, with logs of its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in ("train", "eval")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def take(self) -> dict[str, float]:
        """What the latest rollout logged, and nothing of it any more."""
        logs = {key.removeprefix("specroll/"): values[-1] for key, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        return logs


class _Steps(TrainerCallback):
    """Adds to a step's record what the trainer knows: its own seconds, all sampling aside, the reward and entropy."""

    def __init__(self, contest: Contest, on_step: Callable[[Record], None]) -> None:
        self._contest, self._on_step = contest, on_step
        self._began = self._sampled = self._seconds = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began, self._sampled = time.perf_counter(), self._contest.seconds

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._seconds = time.perf_counter() - self._began - (self._contest.seconds - self._sampled)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if logs and "reward" in logs:
            known = {"train_s": self._seconds, "reward": logs["reward"], "entropy": logs.get("entropy")}
            self._on_step({**self._contest.step, **known})
