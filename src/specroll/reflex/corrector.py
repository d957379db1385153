"""What heads ask of Reflex, whatever its form: corrections for one round, and an ear for what became of them.

Knows tensors and the engine's nouns. Which forms there are is `forms`' matter; nothing here knows heads.

    S  sequences    H  hidden width    K  horizons, k those of one stage    C  candidates
    V  vocabulary   U  draft vocabulary: what can be proposed
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from specroll.types import Draft, Features, TargetOutput, Tree, Verdict


class Setting(NamedTuple):
    """What is corrected: the heads' readout, and how they propose."""

    horizons: int
    row_VH: Tensor
    """lm_head's rows, of the whole vocabulary. Read, never written."""
    vocabulary_U: Tensor | None
    """Token ids of the draft vocabulary; None for all."""
    noisy: bool
    """Candidates are ranked with the noise that the target's draw will use, unless the draw is greedy."""
    along_path: bool
    """What a horizon proposes holds only where the drafted path to it is drawn."""


class Recall(Protocol):
    """One round's corrections. Heads call it stage by stage, with the horizons of a stage together.

    Forms may have other letters for the draft vocabulary: arguments are given by position.
    """

    def states(self, state_SkH: Tensor, stage: slice, /) -> Tensor:
        """The states of these horizons as lm_head is to see them."""
        ...

    def logits_(self, logits_SkU: Tensor, /) -> Tensor:
        """Correct, in place, the logits of so many horizons, of which the first follows the path."""
        ...

    def compared(self, logits_SU: Tensor, /) -> Tensor | None:
        """[2, S, U], the first horizon's logits with all that is known and without it, for `Draft.trial_2S`.

        None for a form that learns in another way whether it helps. Called before `logits_`.
        """
        ...

    def proposed(self, logits_SkU: Tensor, slot_SkC: Tensor, /) -> None:
        """Told of the stage's candidates, best first, as places in the draft vocabulary, and of the logits, without
        noise, that they come from."""
        ...

    def follow(self, token_S: Tensor) -> None:
        """The path goes on with these tokens."""
        ...


class Corrector(Protocol):
    """A form of Reflex, at work for one proposer. It can make proposals worse, never a token wrong."""

    def refresh(self, setting: Setting) -> None:
        """Go on with other weights or another draft vocabulary."""
        ...

    def recall(self, features: Features) -> Recall | None:
        """The corrections of a round that begins; None where nothing is known."""
        ...

    def of_texts(self, past_SL: Tensor, position_S: Tensor) -> Recall | None:
        """What texts up to these places say by themselves, without the rounds that made them; None if nothing."""
        ...

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None) -> None:
        """What became of the round that `recall` was last asked for. `out` may not be kept."""
        ...

    def measures(self) -> dict[str, float]:
        """Numbers for logs, those that are means since the last call. Asks the device: between rollouts only."""
        ...
