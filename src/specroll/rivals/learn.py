"""How the drafter learns: before a run from recorded responses, and in it after every rollout from that rollout's own.

In a run it learns as FastGRPO's does, from the states that verification computed anyway: the proposer keeps them as
they pass by, so nothing is recorded besides and no forward pass of the target is repeated. A rollout teaches once, all
of its responses in one step of AdamW by default, and is then forgotten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from specroll.rivals.context import Passage
from specroll.rivals.eagle import Drafter
from specroll.rivals.loss import Losses, losses, teaches
from specroll.rivals.proposer import FastGRPOProposer
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import load_learning, save_drafter, save_learning
from specroll.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What came of teaching the drafter once. `before` and `after` are on held-out responses in pre-training; in a run
    `before` is on the responses that taught, and there is no `after`."""

    version: int
    responses: int
    updates: int
    seconds: float
    before: Losses
    after: Losses | None = None


class OnlineLearning:
    """Teaches the drafter between rollouts, as `slow.path.SlowPath` does heads: `learn` after every rollout.

    `wants_more` is always false, as nothing has to be recorded for it: the proposer keeps what teaches.
    """

    wants_more = False

    def __init__(self, proposer: FastGRPOProposer, config: FastGRPOConfig = FastGRPOConfig()) -> None:
        self.proposer, self.config = proposer, config
        self.drafter: Drafter = proposer.drafter
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=config.learning_rate)
        self.alarmed = False
        """Told from outside, as for heads; the drafter is taught after every rollout anyway."""
        self.version = 0
        """How often the drafter has changed."""
        self.refused = 0
        """Responses with states that are not finite, which teach nothing."""
        self.seconds = 0.0
        self.report: Taught | None = None
        self.measures: dict[str, float] = {}
        proposer.context.keeps = True

    def record(self, trajectory: Trajectory) -> None:
        """Nothing to take in: see `wants_more`."""

    def learn(
        self, rollout_seconds: float, recording_seconds: float = 0.0, tally: Sequence[Sequence[float]] | None = None
    ) -> bool:
        """After a rollout. Returns whether the drafter has changed; the proposer takes that over by itself."""
        began = time.perf_counter()
        self.measures = {}
        ended = [p for p in self.proposer.take() if p.hidden_TH.shape[0] > p.prompt]
        self.proposer.context.release()
        passages = [p for p in ended if teaches(p)]
        self.refused += len(ended) - len(passages)
        if not passages:
            return False
        told = [_update(self.drafter, self.proposer.model, passages, self.optimizer, self.config)]
        for _ in range(1, self.config.updates):
            told.append(_update(self.drafter, self.proposer.model, passages, self.optimizer, self.config))
        took = time.perf_counter() - began
        changed = math.isfinite(told[0].total(self.config))
        self.version += changed
        self.seconds += took
        self.report = Taught(
            version=self.version, responses=len(passages), updates=len(told), seconds=took, before=told[0]
        )
        self.measures = {
            "learning_seconds": took,
            "heads_version": float(self.version),
            "drafter_feature_loss": told[0].feature,
            "drafter_law_loss": told[0].law,
            "drafter_hits": told[0].hits,
        }
        if changed:
            self.proposer.refresh()
        return changed

    def save(self, folder: Path) -> None:
        """Write the drafter into `folder`, and how far its learning has come."""
        save_drafter(self.drafter, folder, self.proposer.model)
        save_learning(folder, self.drafter, self.optimizer, {name: getattr(self, name) for name in _COUNTS})

    def load(self, folder: Path) -> None:
        """Go on from there. Raises ValueError where that is not possible."""
        for name, value in load_learning(folder, self.drafter, self.proposer.model, self.optimizer).items():
            setattr(self, name, type(getattr(self, name))(value))


_COUNTS = ("version", "refused", "seconds")


def pretrain(
    drafter: Drafter,
    model: PreTrainedModel,
    passages: Sequence[Passage],
    *,
    updates: int,
    config: FastGRPOConfig = FastGRPOConfig(),
    held_out: float = 0.1,
    seed: int = 0,
    on_progress: Callable[[int, int, Losses], None] | None = None,
) -> Taught:
    """Teach a drafter responses of the policy that it will draft for (`passages_of`), in place.

    Each update takes `config.batch_responses` responses, in an order that is new for each pass over them; a share
    `held_out` of the responses only judges. Raises ValueError where nothing teaches.
    """
    began = time.perf_counter()
    if updates < 1:
        raise ValueError(f"a pre-training needs at least one update, got {updates}")
    usable = [p for p in passages if teaches(p)]
    if not usable:
        raise ValueError(
            f"none of the {len(passages)} responses teaches a drafter: it takes two tokens, and states that are finite"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(usable), generator=generator).tolist()
    judges = min(len(usable) - 1, math.ceil(held_out * len(usable)))
    judge, teach = [usable[i] for i in order[:judges]] or usable, [usable[i] for i in order[judges:]]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=config.fit_learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(config.warm_up * updates), updates)
    before = losses(drafter, model, judge, config, learn=False)
    queue: list[int] = []
    for update in range(updates):
        if len(queue) < min(config.batch_responses, len(teach)):
            queue += torch.randperm(len(teach), generator=generator).tolist()
        batch, queue = queue[: config.batch_responses], queue[config.batch_responses :]
        told = _update(drafter, model, [teach[i] for i in batch], optimizer, config)
        schedule.step()
        if on_progress is not None:
            on_progress(update + 1, updates, told)
    after = losses(drafter, model, judge, config, learn=False)
    took = time.perf_counter() - began
    return Taught(version=1, responses=len(teach), updates=updates, seconds=took, before=before, after=after)


@torch.no_grad()
def passages_of(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], prompts: Sequence[Sequence[int]]
) -> list[Passage]:
    """Recorded responses with the states of their prompts in front, which `model` is run for, once for each prompt.

    `prompts[i]` are the token ids of the prompt of `trajectories[i]`.
    """
    if len(prompts) != len(trajectories):
        raise ValueError(f"each trajectory needs its prompt; got {len(trajectories)} and {len(prompts)} prompts")
    decoder, known, made = model.get_decoder(), {}, []
    for trajectory, prompt in zip(trajectories, map(tuple, prompts), strict=True):
        if prompt not in known:
            ids_1P: Tensor = torch.tensor([prompt], device=model.device)
            known[prompt] = decoder(input_ids=ids_1P, use_cache=False).last_hidden_state[0].cpu()
        hidden_TH = torch.cat((known[prompt][:-1], trajectory.hidden_TH))  # whose first one is the last of the prompt
        token_T = torch.cat((torch.tensor(prompt[1:], dtype=torch.int64), trajectory.token_T))
        made.append(Passage(hidden_TH, token_T, len(prompt)))
    return made


def _update(
    drafter: Drafter,
    model: PreTrainedModel,
    passages: Sequence[Passage],
    optimizer: torch.optim.Optimizer,
    config: FastGRPOConfig,
) -> Losses:
    """One step on all of them. The weights stay as they are where the loss is not finite."""
    optimizer.zero_grad(set_to_none=True)
    told = losses(drafter, model, passages, config, learn=True)
    if math.isfinite(told.total(config)):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return told
