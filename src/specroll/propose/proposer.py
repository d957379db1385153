"""Proposals of future-token heads: candidates of every horizon, made horizon by horizon along the best path.

Each horizon knows the best candidate of the one before it, so it waits for it; heads that do not see the path are done
all at once. Whether candidates were right is decided elsewhere.

    S  sequences       K  horizons, k some of them    C  candidates    X  several things side by side
    H  hidden width    V  draft vocabulary
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll import noise
from specroll.budget.calibrate import HitCalibrator
from specroll.config import ReflexName, check_reflex
from specroll.propose.heads import FutureHeads
from specroll.propose.products import HeadProducts
from specroll.propose.readout import Readout, output_layer
from specroll.propose.tally import Tally
from specroll.reflex import Corrector, Recall, Setting, corrector
from specroll.types import Draft, Features, TargetOutput, Tree, Verdict

_SETTLED, _EVERY = 256, 4
"""After so many rounds only one in so many teaches the calibration: it costs as much as a tenth of a proposal."""


class Best(NamedTuple):
    """Candidates of every horizon, best first, what they were ranked by, and what `Draft` has of the first's best."""

    token_SKC: Tensor
    score_SKC: Tensor
    trial_2S: Tensor | None
    lean_S: Tensor | None


class HeadsProposer:
    """The heads as a `types.Proposer`: candidates of all horizons, for all sequences together, with calibrated hits.

    `ranking="noise"` scores a candidate by s log q + g, with the noise g that the target's own draw at that position
    will use and the heads' sharpness s; "probability" by log q alone, as does temperature 0. Weights are made ready at
    the first proposal after they changed; call `refresh` after a policy update that may have moved lm_head or the input
    embedding, or when the draft vocabulary was changed. With `watched`, `tally` counts how often the heads alone are
    right; nothing is done for it otherwise.
    """

    name = "heads"

    def __init__(
        self,
        heads: FutureHeads,
        model: PreTrainedModel,
        *,
        ranking: Literal["noise", "probability"] = "noise",
        candidates: int = 16,
        reflex: ReflexName = "associative",
        watched: bool = False,
    ) -> None:
        if ranking not in ("noise", "probability"):
            raise ValueError(f"ranking must be 'noise' or 'probability', got {ranking!r}")
        check_reflex(reflex)
        if candidates < 1:
            raise ValueError(f"a horizon needs at least one candidate, got candidates={candidates}")
        if (model_sizes := tuple(output_layer(model).weight.shape)) != (heads.vocab_size, heads.hidden_size):
            raise ValueError(
                f"these heads are for a vocabulary of {heads.vocab_size} and width {heads.hidden_size}, the model has "
                f"{model_sizes[0]} and {model_sizes[1]}: fit heads to this model"
            )
        self.heads, self.model, self.ranking, self.candidates = heads, model, ranking, candidates
        self.reflex: ReflexName = reflex
        self.tally = Tally(heads.first_BFI.device) if watched else None
        self.horizons = heads.horizons
        self.version = 0
        self.corrector: Corrector | None = None
        self.calibrator = self._fresh_calibrator()
        self._take_over()

    @property
    def fitted(self) -> bool:
        return self.heads.calibration_2PK is not None

    @property
    def reads_past(self) -> bool:
        return self.corrector is not None

    def refresh(self) -> None:
        """Take over the model's present lm_head and the heads' present vocabulary and weights: a new version."""
        self._take_over()
        self.version += 1
        if self.heads.calibration_2PK is self._calibration_2PK:
            self.calibrator.forget()
        else:  # they have been fitted anew
            self.calibrator = self._fresh_calibrator()

    def _take_over(self) -> None:
        vocabulary_V = self.heads.vocabulary_V
        self._readout = Readout.of(self.model, vocabulary_V)
        self._word_V = None if vocabulary_V is None else noise.token_words(vocabulary_V)
        setting = Setting(
            self.horizons,
            output_layer(self.model).weight.detach(),
            vocabulary_V,
            noisy=self.ranking == "noise",
            along_path=self.heads.shares,
        )
        if self.corrector is None:
            self.corrector = corrector(self.reflex, setting)
        else:
            self.corrector.refresh(setting)
        self._products: HeadProducts | None = None
        self._rounds = 0  # observed since

    def _fresh_calibrator(self) -> HitCalibrator:
        heads = self.heads
        self._calibration_2PK = heads.calibration_2PK
        return HitCalibrator(
            self.horizons, trained=heads.trained, device=heads.first_BFI.device, measured_2PK=heads.calibration_2PK
        )

    @torch.no_grad()
    def propose(self, features: Features) -> Draft:
        noisy = self.ranking == "noise" and features.sampling.temperature > 0
        recall = None if self.corrector is None else self.corrector.recall(features)
        noise_SKV = self._noise(features) if noisy else None
        best = self.best(features.hidden_SH, features.root_S, noise_SKV, recall, compare=self._teaches)
        hits = self.calibrator.hit(best.score_SKC)
        return Draft(best.token_SKC, best.score_SKC, *hits, best.trial_2S, best.lean_S)

    def recall(self, past_SL: Tensor, position_S: Tensor) -> Recall | None:
        """What texts up to these places say by themselves; None where Reflex is off or needs more than texts."""
        return None if self.corrector is None else self.corrector.of_texts(past_SL, position_S)

    def measures(self) -> dict[str, float]:
        """What Reflex does, for logs (`Corrector.measures`). Asks the device: between rollouts only."""
        return {} if self.corrector is None else self.corrector.measures()

    @torch.no_grad()
    def best(
        self,
        hidden_SH: Tensor,
        root_S: Tensor,
        noise_SKV: Tensor | None,
        recall: Recall | None = None,
        *,
        compare: bool = False,
    ) -> Best:
        """The candidates of every horizon: FutureHeads.forward along the best path.

        `noise_SKV` is that of the draft vocabulary; None ranks by logits alone. `recall` corrects the heads' logits;
        `compare` asks what it is worth.
        """
        products, state_SH = self._prepared(), hidden_SH.float()
        told_BSF = products.told(root_S)
        found: list[tuple[Tensor, Tensor]] = []
        trial_2S = lean_S = None
        for stage in self._stages():
            states_k = [products.state(k, state_SH, told_BSF) for k in range(stage.start, stage.stop)]
            state_SkH = states_k[0][:, None] if len(states_k) == 1 else torch.stack(states_k, dim=1)
            if recall is not None:
                state_SkH = recall.states(state_SkH, stage)
            logits_SkV = self._readout.finish(products.readout(state_SkH))
            if recall is not None:
                if not found:
                    trial_2S, lean_S = self._lean(recall if compare else None, logits_SkV[:, 0], noise_SKV)
                logits_SkV = recall.logits_(logits_SkV)
            score_SkV = self._ranked(logits_SkV, noise_SKV, stage)
            score_SkC, index_SkC = score_SkV.topk(min(self.candidates, score_SkV.shape[-1]), dim=-1)
            if recall is not None:
                recall.proposed(logits_SkV, index_SkC)
            found.append((index_SkC, score_SkC))
            if stage.stop < self.horizons:
                best_S = index_SkC[:, 0, 0]
                state_SH, told_BSF = states_k[-1], products.told_drafted(best_S)
                if recall is not None:
                    recall.follow(self._token(best_S))
        index_SKC, score_SKC = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return Best(self._token(index_SKC), score_SKC, trial_2S, lean_S)

    def _lean(
        self, recall: Recall | None, logits_SV: Tensor, noise_SKV: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """`Draft.trial_2S` and `lean_S`, by the first horizon's logits before Reflex corrects them.

        A form that corrects states has done so by now: its help, which is small, counts as the heads' own, because
        logits of the states before would take lm_head a second time.
        """
        both_2SV = None if recall is None else recall.compared(logits_SV)
        if both_2SV is not None:
            trial_2S = self._first(both_2SV, noise_SKV)
            return trial_2S, trial_2S[1]
        return None, None if self.tally is None else self._first(logits_SV, noise_SKV)

    def _first(self, logits_XSV: Tensor, noise_SKV: Tensor | None) -> Tensor:
        """The first horizon's best candidates by such logits, of which there may be several kinds."""
        return self._token(self._ranked(logits_XSV[..., None, :], noise_SKV, slice(0, 1)).argmax(-1).squeeze(-1))

    def _ranked(self, logits_SkV: Tensor, noise_SKV: Tensor | None, stage: slice) -> Tensor:
        """What candidates of these horizons are ranked by."""
        if noise_SKV is None:
            return logits_SkV
        return add_noise(logits_SkV, noise_SKV[:, stage], self.heads.sharpness_K[stage])

    def _token(self, index: Tensor) -> Tensor:
        """Token ids of places in the draft vocabulary."""
        return index if self.heads.vocabulary_V is None else self.heads.vocabulary_V.take(index)

    def _stages(self) -> list[slice]:
        """Horizons that can be done at once: each by itself where it must know what the one before proposes."""
        if self.heads.shares:
            return [slice(k, k + 1) for k in range(self.horizons)]
        return [slice(0, self.horizons)]

    @torch.no_grad()
    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        if self._teaches:
            self.calibrator.observe(draft, tree, verdict)
        if self.tally is not None:
            self.tally.count(draft.token_SKC[:, 0, 0] if draft.lean_S is None else draft.lean_S, tree, verdict)
        if self.corrector is not None:
            self.corrector.observe(draft, tree, verdict, out)
        self._rounds += 1

    @property
    def _teaches(self) -> bool:
        """Whether this round's outcome is to be learned from."""
        return self._rounds < _SETTLED or self._rounds % _EVERY == 0

    def _noise(self, features: Features) -> Tensor:
        """g at the positions that the horizons predict (the root's + 1 .. K), for the draft vocabulary: [S, K, V]."""
        seed, word_V = features.sampling.seed, self._word_V
        ahead_K = torch.arange(1, self.horizons + 1, device=features.position_S.device)
        position_SK = features.position_S[:, None] + ahead_K
        sample_N = features.sample_S[:, None].expand_as(position_SK).flatten()
        position_N = position_SK.flatten()
        if word_V is None:
            noise_NV = noise.gumbel_all(seed, sample_N, position_N, self.heads.vocab_size)
        else:
            noise_NV = noise.gumbel_of_words(seed, sample_N, position_N, word_V)
        return noise_NV.unflatten(0, position_SK.shape)

    def _prepared(self) -> HeadProducts:
        if self._products is None or not self._products.fits(self.heads):
            self._products = None  # never hold the old packs beside the new
            self._products = HeadProducts(self.heads, self.model, self._readout)
        return self._products


def add_noise(logits_SKV: Tensor, noise_SKV: Tensor, sharpness_K: Tensor) -> Tensor:
    """What candidates are ranked by: s_k log q + g, up to a constant of each row."""
    return torch.addcmul(noise_SKV, logits_SKV, sharpness_K[:, None])
