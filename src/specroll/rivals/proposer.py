"""FastGRPO's drafter as a `types.Proposer`, with the states of running sequences that it follows (`types.Follower`).

The drafter sees prompts and responses whole: the engine hands over the last hidden states of a prompt's tokens when it
runs the prompt, and those of every kept row after each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll.model.attention import Pass
from specroll.model.cache import CacheShape
from specroll.model.linear import PackedLinears
from specroll.propose.readout import Readout, embed, output_layer
from specroll.rivals.context import Context, Passage, ReadPrompt
from specroll.rivals.draft import draft, rows_behind
from specroll.rivals.eagle import Drafter
from specroll.rivals.rule import FastGRPORule
from specroll.types import Branches, Features, TargetOutput, Tree, Verdict


class FastGRPOProposer:
    """Proposes explicit trees whose `hit_SM` are the drafter's own probabilities, as it has no calibration.

    The rule gives the trees their size and shape. A drafter that has been taught is taken over at the next proposal;
    `refresh` makes that a new version, for a budget that learns what proposals are worth.
    """

    name = "fastgrpo"
    reads_past = False  # of texts: it has their states
    fitted = False  # however well it is taught, its confidences are no promises: nothing is to be measured by them

    def __init__(self, drafter: Drafter, model: PreTrainedModel, rule: FastGRPORule) -> None:
        """`model`: the causal LM that the drafter is for, without an adapter's wrapper around it."""
        if (width := output_layer(model).weight.shape[1]) != drafter.hidden_size:
            raise ValueError(f"the drafter is for states of width {drafter.hidden_size}, the model's have {width}")
        self.drafter, self.model, self.rule = drafter, model, rule
        self.horizons = rule.config.most_depth
        self.version = 0
        self.context = Context(CacheShape.of(drafter.body.config, model.dtype, model.device))
        self._lm_head = output_layer(model)
        self._finish = Readout.of(model, None).finish
        self._stamp: tuple[tuple[int, int], ...] | None = None
        self._packs = ExitStack()
        self._take_over()

    def refresh(self) -> None:
        """The drafter, or what it shares with the policy, has changed."""
        self.version += 1

    # --- what the engine tells ------------------------------------------------------------------------------------

    def begin(self, slots: int, length: int) -> None:
        self._take_over()
        self.context.begin(slots, self._slot_length(length))

    def slot_bytes(self, length: int) -> int:
        """Its own keys and values of a sequence of so many tokens."""
        return self.context.shape.bytes_per_token * (self._slot_length(length) + 1)

    def _slot_length(self, length: int) -> int:
        return length + rows_behind(self.rule.config)

    @torch.no_grad()
    def read(self, token_P: Sequence[int], hidden_PH: Tensor) -> ReadPrompt:
        return self.context.read(token_P, hidden_PH, self._run)

    def admit(self, read: ReadPrompt, root: int) -> None:
        self.context.admit(read, root)

    def keep(self, hidden_NH: Tensor, token_N: Tensor, counts: Sequence[int]) -> None:
        self.context.keep(hidden_NH, token_N, counts)

    def retire(self, source: Sequence[int]) -> None:
        self.context.retire(source)

    def take(self) -> list[Passage]:
        """What the latest rollout's responses teach (`Context.take`)."""
        return self.context.take()

    # --- proposals ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, features: Features) -> Branches:
        shape = self.rule.shape(features.root_S.shape[0])
        if not shape.nodes:
            none = features.root_S.new_empty(features.root_S.shape[0], 0)
            return Branches(none, none, none.double())
        self._take_over()
        return draft(self.context, self._run, self._logits, shape)

    def observe(self, draft: Branches, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """Nothing to learn within a rollout: what was kept has been told by `keep`."""

    def _run(self, hidden_NH: Tensor, token_N: Tensor, position_N: Tensor, rows: Pass) -> Tensor:
        return self._network(hidden_NH, embed(self.model, token_N), position_N, rows)

    def _logits(self, state: Tensor) -> Tensor:
        """By the target's own lm_head, in whatever way it runs during a rollout."""
        return self._finish(self._lm_head(state))

    def _take_over(self) -> None:
        """The drafter's present weights, in the model's dtype and packed."""
        stamp = tuple((p.data_ptr(), p._version) for p in self.drafter.parameters())
        if self._stamp == stamp:
            return
        self._packs.close()  # never hold the old ones beside the new
        self._network = deepcopy(self.drafter).requires_grad_(False).to(self.model.dtype)
        self._packs.enter_context(PackedLinears(self._network, rounded_to=self.model.dtype).in_use())
        self._stamp = stamp
