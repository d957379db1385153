"""How soon heads that know nothing are worth what fitted ones are: the slow path's cold start, on a policy that stands
still. Rollout by rollout, as a training goes, and after each lesson both are shown responses to prompts that neither
has seen. Knows the slow path and the judge of heads; no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from specroll.config import EngineConfig
from specroll.engine import Engine, Rollout
from specroll.propose.heads import FutureHeads
from specroll.propose.judge import Judge
from specroll.propose.proposer import HeadsProposer
from specroll.slow import cold
from specroll.slow.path import SlowPath
from specroll.types import Request, SamplingParams, Trajectory

RESPONSES = 32
"""Of one rollout."""
JUDGES = 16
"""Prompts whose responses, one rollout's number to each, judge the heads."""
NODES = 8


def cold_start(
    model: PreTrainedModel,
    fitted: FutureHeads,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    generations: int,
    tokens: int,
    running: int,
    on_rollout: Callable[[int, int], None],
) -> dict[str, Any]:
    """`generations` responses of at most `tokens` tokens to each prompt; the first `JUDGES` prompts judge.

    Returns `lessons`, by the `responses` that heads had learned from: tokens per round with `NODES` nodes; `fitted`,
    those of the fitted heads; and `share`, the part of the rollouts' time that learning took. Further prompts are used
    in turns. `on_rollout` is told how many rollouts are done, and of how many. Needs more than `JUDGES` prompts.
    """
    learners, each = prompts[JUDGES:], -(-RESPONSES // generations)
    rollouts = -(-cold.LAST // (each * generations))
    sample = _Sampler(Engine(model, config=EngineConfig(max_running=running)), sampling, generations, tokens)
    judge = Judge(model, sample(prompts[:JUDGES])[1])
    on_rollout(1, 1 + rollouts)

    def worth(heads: FutureHeads) -> float:
        return 1.0 + judge.acceptance(heads, (NODES,))[NODES]

    heads = FutureHeads.for_model(model)
    slow = SlowPath(heads, model)
    lessons = [{"responses": 0, "tokens_per_round": worth(heads)}]
    seconds = 0.0
    for number in range(rollouts):
        rollout, trajectories = sample([learners[(number * each + i) % len(learners)] for i in range(each)])
        seconds += rollout.seconds
        for trajectory in trajectories:
            slow.record(trajectory)
        if slow.learn(rollout.seconds, rollout.recording_seconds):
            sample.engine.proposer = HeadsProposer(heads, model)
            lessons.append({"responses": slow.cold.completions, "tokens_per_round": worth(heads)})
        on_rollout(2 + number, 1 + rollouts)
    return {"lessons": lessons, "fitted": worth(fitted), "nodes": NODES, "share": slow.seconds / seconds}


@dataclass(slots=True)
class _Sampler:
    """Responses to prompts, no two from the same draws."""

    engine: Engine
    sampling: SamplingParams
    generations: int
    tokens: int
    sampled: int = 0

    def __call__(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Rollout, list[Trajectory]]:
        requests = [
            Request(prompt_ids=prompt, sample=self.sampled + i, max_new_tokens=self.tokens)
            for i, prompt in enumerate(p for p in prompts for _ in range(self.generations))
        ]
        self.sampled += len(requests)
        found = self.engine.record(requests, self.sampling)
        self.engine.target.release()
        return found
