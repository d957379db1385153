"""A proposer of one's own: when the newest tokens are the beginning of a known phrase, it proposes the rest.

    specroll generate --proposers examples.phrase_proposer:PhraseList --prompt "How do bees make honey?"

That is all that is needed: a class with `propose` and `observe`, called with the model and its tokenizer. What it
proposes can make a sample come sooner and never different, and everything here stays on the device: the host does not
wait for it.

    S  running sequences    E  beginnings of phrases    L  tokens of the longest one    K  tokens of the longest rest
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specroll.types import Draft, Features, TargetOutput, Tree, Verdict


class PhraseList:
    """Proposes the rest of a phrase; how likely that is drawn, it learns."""

    phrases: tuple[str, ...] = ("The answer is", "we need to find", "the total number of", "On the other hand,")

    def __init__(self, model: Any, tokenizer: Any) -> None:
        phrases = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in self._texts()]
        found = [(ids[:n], ids[n:]) for ids in phrases for n in range(1, len(ids))]
        found.sort(key=lambda beginning_rest: -len(beginning_rest[0]))  # the longest beginning tells most
        reach, longest = max(len(rest) for _, rest in found), len(found[0][0])
        device = model.device
        pad = -1  # no token: it stands for any in a beginning, and for none in a rest
        self._begins_EL = torch.tensor([[pad] * (longest - len(b)) + b for b, _ in found], device=device)
        self._rest_EK = torch.tensor([r + [pad] * (reach - len(r)) for _, r in found], device=device)
        self._tried, self._right = torch.tensor(2.0, device=device), torch.tensor(1.0, device=device)

    def _texts(self) -> list[str]:
        """Each phrase as a text may begin with it, and as it stands within one."""
        return [text for phrase in self.phrases for text in (phrase, f" {phrase}")]

    def propose(self, features: Features) -> Draft:
        tail_SL = self._tail(features)
        matches_SE = ((tail_SL[:, None] == self._begins_EL) | (self._begins_EL < 0)).all(dim=-1)
        best_S = matches_SE.int().argmax(dim=-1)  # the first of them
        rest_SK = self._rest_EK[best_S]
        hopeful_SK = matches_SE.any(dim=-1)[:, None] & (rest_SK >= 0)
        hit_SK = torch.where(hopeful_SK, self._right / self._tried, 0.0)
        token_SK = rest_SK.clamp(min=0)
        # One candidate for each of the K next places. Where nothing is known its probability is 0.
        return Draft(token_SKC=token_SK[..., None], score_SKC=hit_SK.log()[..., None], hit_SKC=hit_SK[..., None])

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """Of the tokens that the text led to, count those that were drawn. Only what was hoped for."""
        hoped_N = draft.hit_SKC[tree.sequence_N, (tree.depth_N - 1).clamp(min=0), 0] > 0
        reached_N = verdict.accepted_N[tree.parent_N] & (tree.depth_N > 0) & hoped_N
        self._tried = self._tried + reached_N.sum()
        self._right = self._right + (reached_N & verdict.accepted_N).sum()

    def _tail(self, features: Features) -> Tensor:
        """The newest tokens of each text, the root last; -2 in front of its first one."""
        assert features.past_SL is not None
        back_L = torch.arange(self._begins_EL.shape[1] - 1, -1, -1, device=features.position_S.device)
        place_SL = features.position_S[:, None] - back_L
        return features.past_SL.gather(1, place_SL.clamp(min=0)).where(place_SL >= 0, -2)
