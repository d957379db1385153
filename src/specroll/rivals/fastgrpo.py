"""FastGRPO (arXiv 2509.21792) as our engine runs it: a drafter that proposes, a rule that sizes trees, a way to learn.

    rival = FastGRPO.for_model(model)
    engine = Engine(model, proposer=rival.proposer, rule=rival.rule)
    rollout = engine.generate(requests, sampling)
    rival.learner.learn(rollout.seconds)

All else is the engine's own: passes, slots, draws, statistics. So a response is the same token for token as with any
other method, and what differs is time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from specroll.rivals.eagle import Drafter
from specroll.rivals.learn import OnlineLearning
from specroll.rivals.proposer import FastGRPOProposer
from specroll.rivals.rule import FastGRPORule
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import load_drafter


@dataclass(frozen=True, slots=True)
class FastGRPO:
    """All parts of the method, for one model."""

    drafter: Drafter
    rule: FastGRPORule
    proposer: FastGRPOProposer
    learner: OnlineLearning

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        drafter: Drafter | str | Path | None = None,
        config: FastGRPOConfig = FastGRPOConfig(),
    ) -> FastGRPO:
        """`model`: the causal LM, without an adapter's wrapper around it (`Engine(..).target.causal`).

        `drafter`: one that is there, the folder of one, or None for an untrained one.
        """
        if drafter is None:
            drafter = Drafter.for_model(model)
        elif not isinstance(drafter, Drafter):
            drafter = load_drafter(drafter, model)
        rule = FastGRPORule(config)
        proposer = FastGRPOProposer(drafter, model, rule)
        return cls(drafter, rule, proposer, OnlineLearning(proposer, config))
