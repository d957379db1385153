"""Reflex as an associative memory: in contexts like this one, which tokens came next?

The verifier's feedback on a trajectory is the tokens that it drew. Every place j of prompt and response so far is a
memory: its key is the tokens before it, its value the token x_j. Where the path of a proposal ends in c_1, c_2, ..
(the last token first), a place weighs as much as its key agrees:

    w_j = 1 + sum_n b_n [x_{j-1} = c_1, .., x_{j-n} = c_n],
    logits(v) += lambda * sum_j w_j [x_j = v] / (w_0 + sum_j w_j).

So the correction of a token is at most lambda, and next to nothing where nothing alike was seen. It knows one
trajectory and its prompt, needs no gradient, and is gone when the trajectory ends. Verified tokens in, logits out: it
knows neither heads nor trees.

Hidden states as keys (the target's own, or its cached values) were tried: with them hits were as often, no oftener.

    S  sequences    L  places of prompt and response    k  horizons of a stage    V  draft vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.reflex.corrector import Setting
from specroll.reflex.gate import Gate
from specroll.types import Draft, Features, TargetOutput, Tree, Verdict

STRENGTH = 7.0
"""lambda, in nats."""
RESERVE = 20.0
"""w_0: how much similarity it takes for half of the strength."""
AGREEMENT = (40.0, 200.0, 1000.0)
"""b_n for one, two and three tokens that agree."""


class AssociativeReflex:
    """The `Corrector` of that form: the memory, and one gate for all sequences."""

    def __init__(self, setting: Setting) -> None:
        self.gate = Gate(setting.row_VH.device)
        self.refresh(setting)

    def refresh(self, setting: Setting) -> None:
        """What the gate has learned stays."""
        row_VH = setting.row_VH
        self._memory = AssociativeMemory(row_VH.shape[0], setting.vocabulary_U, row_VH.device)

    def recall(self, features: Features) -> AssociativeRecall | None:
        return None if features.past_SL is None else self.of_texts(features.past_SL, features.position_S)

    def of_texts(self, past_SL: Tensor, position_S: Tensor) -> AssociativeRecall:
        return self._memory.recall(past_SL, position_S, self.gate.open)

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None) -> None:
        if draft.trial_2S is not None:
            self.gate.observe(draft.trial_2S, verdict.draws.token_N[tree.root_S(draft.trial_2S.shape[1])])

    def measures(self) -> dict[str, float]:
        """`reflex_open`: 1 while it corrects, 0 while the gate is shut."""
        return {"reflex_open": float(self.gate.open)}


class AssociativeMemory:
    """What draft-vocabulary slots past tokens have. Of one vocabulary; holds nothing of any trajectory."""

    def __init__(self, vocab_size: int, vocabulary_V: Tensor | None, device: torch.device) -> None:
        """`vocabulary_V`: the token ids that logits are of; None for all."""
        if vocabulary_V is None:
            vocabulary_V = torch.arange(vocab_size, device=device)
        self.slot_of = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self.slot_of[vocabulary_V] = torch.arange(vocabulary_V.numel(), device=device)
        self.worth_of = torch.zeros(vocab_size, device=device)  # 0 where a token has no logit
        self.worth_of[vocabulary_V] = STRENGTH
        self.weight_X = torch.tensor([1.0, *AGREEMENT], device=device).cumsum(0)  # w_j, by tokens that agree
        self.longer_X = torch.arange(1, len(AGREEMENT) + 2, device=device).clamp_(max=len(AGREEMENT))  # one more agrees

    def recall(self, past_SL: Tensor, position_S: Tensor, share: Tensor) -> AssociativeRecall:
        """What the sequences' tokens up to their roots at `position_S` say; the path is the root so far.

        `share`, a scalar in [0, 1], is how much of it counts (`Gate.open`).
        """
        return AssociativeRecall(self, past_SL, position_S, share)


class AssociativeRecall:
    """One round's corrections, along the path that is being drafted."""

    def __init__(self, memory: AssociativeMemory, past_SL: Tensor, position_S: Tensor, share: Tensor) -> None:
        """What `past_SL` holds behind the roots does not matter."""
        length, most = past_SL.shape[1], len(AGREEMENT)
        self._memory, self._slot_SL = memory, memory.slot_of.take(past_SL)
        self._whole_SL = memory.worth_of.take(past_SL)
        self._worth_SL = self._whole_SL * share
        self._known_SL = (torch.arange(length, device=past_SL.device) <= position_S[:, None]).float()
        key_SLn = F.pad(past_SL, (most, 0), value=-1).unfold(1, most, 1)  # the tokens before each place; -1 where none
        self._before_SL = key_SLn[:, :-1, -1]
        path_S1n = key_SLn.gather(1, (position_S + 1)[:, None, None].expand(-1, 1, most))
        # How many of the path's last tokens stand before a place; a column of none before the first.
        same_nSL = (key_SLn[:, :-1] == path_S1n).long().unbind(-1)  # the latest token last
        agree_SL = same_nSL[0]
        for same_SL in same_nSL[1:]:
            agree_SL = torch.addcmul(same_SL, same_SL, agree_SL)
        self._agree_SL1 = F.pad(agree_SL, (1, 0))

    def follow(self, token_S: Tensor) -> None:
        """The path goes on with these tokens."""
        longer_SL = self._memory.longer_X.take(self._agree_SL1[:, :-1])
        torch.mul(longer_SL, self._before_SL == token_S[:, None], out=self._agree_SL1[:, 1:])

    def correct_(self, logits_SV: Tensor, ahead: int = 0, *, wholly: bool = False) -> Tensor:
        """Add, in place, what is known of the token `ahead` places behind the one that follows the path.

        `wholly`: all of it, whatever share of it counts.
        """
        agree_SL = self._agree_SL1[:, 1:]
        if ahead:
            agree_SL = F.pad(agree_SL, (ahead, 0))[:, :-ahead]
        weight_SL = self._memory.weight_X.take(agree_SL).mul_(self._known_SL)
        total_S1 = weight_SL.sum(1, keepdim=True).add_(RESERVE)
        worth_SL = self._whole_SL if wholly else self._worth_SL
        return logits_SV.scatter_add_(1, self._slot_SL, weight_SL.mul_(worth_SL).div_(total_S1))

    def states(self, state_SkH: Tensor, stage: slice) -> Tensor:
        return state_SkH  # it knows tokens only

    def logits_(self, logits_SkV: Tensor) -> Tensor:
        for ahead, logits_SV in enumerate(logits_SkV.unbind(1)):
            self.correct_(logits_SV, ahead)
        return logits_SkV

    def compared(self, logits_SV: Tensor) -> Tensor:
        return torch.stack((self.correct_(logits_SV.clone(), wholly=True), logits_SV))

    def proposed(self, logits_SkV: Tensor, slot_SkC: Tensor) -> None:
        """What comes of it is seen in the text."""
