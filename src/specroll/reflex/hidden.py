"""Reflex as a memory in hidden space, the published form: a trajectory's past errors move the heads' states.

Where verification shows that a horizon was wrong, the error points somewhere in hidden space (`errors`). What it has in
common over a trajectory is remembered (`memory`), and while that foretells the next errors the head's state is moved
along it before lm_head sees it:

    z <- z + STRENGTH gate RMS(z) m / RMS(m).

A proposal of horizon k can be judged only when its position is drawn, maybe rounds later (`ledger`). All of it is
per trajectory and horizon, takes no gradient, and is gone when the trajectory ends. It is bounded by STRENGTH, and
where no error repeats the gate stays shut and the states are what they were, bit for bit.

    S  sequences    H  hidden width    K  horizons, k those of a stage    R  roots that entries wait for
    C  candidates   M  known tokens: candidates and the likeliest T of q    X  sketch
    V  vocabulary   U  draft vocabulary    N  packed rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from specroll.reflex.corrector import Setting
from specroll.reflex.errors import Errors, errors, support
from specroll.reflex.ledger import Ledger, Matured
from specroll.reflex.memory import Memory, rms
from specroll.types import Draft, Features, TargetOutput, Tree, Verdict

STRENGTH = 0.04
"""Most of a correction, in units of the state's RMS: the top of the published range, as gates seldom open wide."""
DISTRIBUTION, COVERAGE = 1.0, 0.5
"""Weights of the two errors. The first is a gradient; the second is an error of one token at a time."""
LIKELIEST = 12
"""Tokens of q and of p that a comparison looks at besides the candidates: 41 in all with 16 of these."""
GREEDY = 1e-3
"""Temperature that greedy laws are read at: one token has all of it."""
_MEANS = ("alignment", "distribution_error", "coverage_error", "severity")


class HiddenReflex:
    """The `Corrector` of that form."""

    def __init__(self, setting: Setting) -> None:
        self.refresh(setting)

    def refresh(self, setting: Setting) -> None:
        """All trajectories are forgotten: their errors were those of other heads, or of another policy."""
        words, width = setting.row_VH.shape
        device = setting.row_VH.device
        self._setting = setting
        self.ledger = Ledger(setting.horizons, device)
        self.memory = Memory(setting.horizons, width, device)
        self._inside_V = torch.ones(words, dtype=torch.bool, device=device)
        if setting.vocabulary_U is not None:
            self._inside_V = torch.zeros_like(self._inside_V).index_fill_(0, setting.vocabulary_U, True)
        self._size = words if setting.vocabulary_U is None else setting.vocabulary_U.numel()
        self._round: HiddenRecall | None = None
        self._forget_measures()

    def _forget_measures(self) -> None:
        device = self._setting.row_VH.device
        self._told = self.ledger.matured, self.ledger.dropped
        self._open = torch.zeros((), device=device)
        self._gates = 0
        self._sum_X = torch.zeros(len(_MEANS), device=device)
        self._count_X = torch.zeros(len(_MEANS), device=device)

    def recall(self, features: Features) -> HiddenRecall:
        self.memory.follow(*self.ledger.follow(features.sample_S, features.position_S, features.past_SL))
        gate_SK = self.memory.gate()
        self._open, self._gates = self._open + gate_SK.sum(), self._gates + gate_SK.numel()
        push_SKH = self.memory.direction() * (STRENGTH * gate_SK)[..., None]
        self._round = HiddenRecall(push_SKH, features.sampling.temperature)
        return self._round

    def of_texts(self, past_SL: Tensor, position_S: Tensor) -> None:
        """Nothing: errors are known only where rounds were verified."""

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None) -> None:
        asked, self._round = self._round, None
        if asked is None or out is None:
            return
        self.ledger.write(*asked.entries(self._setting.vocabulary_U, self.memory.sketch()))
        matured = self.ledger.mature(tree, verdict)
        usable_SRK = matured.now_SRK & matured.followed_SRK if self._setting.along_path else matured.now_SRK
        found = self._errors(matured, usable_SRK, out.logits_NV, asked.temperature, draft.token_SKC.shape[-1])
        self._learn(found, usable_SRK)

    def _errors(
        self, matured: Matured, usable_SRK: Tensor, logits_NV: Tensor, temperature: float, candidates: int
    ) -> Errors:
        """What the target's laws, read at the rollout's temperature, say of the entries."""
        token_SRKM, logq_SRKM = self.ledger.token_SRKA, self.ledger.number_SRKB
        assert token_SRKM is not None and logq_SRKM is not None  # entries were written
        scale, known = 1.0 / max(temperature, GREEDY), token_SRKM.shape[-1]
        vocabulary_U = self._setting.vocabulary_U
        law_NU = logits_NV if vocabulary_U is None else logits_NV.index_select(1, vocabulary_U)
        law_NU = law_NU.float() * scale
        top_NT = law_NU.topk(min(LIKELIEST, law_NU.shape[-1]), dim=-1).indices
        top_NT = top_NT if vocabulary_U is None else vocabulary_U.take(top_NT)
        logz_SRK = None
        if temperature == 0 or not self._setting.noisy:
            logz_SRK = law_NU.logsumexp(-1)[matured.row_SRK]
        on = support(
            token_SRKM,
            logq_SRKM[..., :known],
            top_NT[matured.row_SRK],
            matured.drawn_SRK,
            self._inside_V,
            candidates=candidates,
            size=self._size,
        )
        return errors(
            on,
            logits_NV[matured.row_SRK[..., None], on.token_EA].float() * scale,
            matured.drawn_SRK,
            self._setting.row_VH,
            usable_SRK,
            candidates=candidates,
            logz_E=logz_SRK,
        )

    def _learn(self, found: Errors, usable_SRK: Tensor) -> None:
        assert self.ledger.token_SRKA is not None and self.ledger.number_SRKB is not None
        before_SRKX = self.ledger.number_SRKB[..., self.ledger.token_SRKA.shape[-1] :]
        error_SRKH = DISTRIBUTION * found.distribution_EH + COVERAGE * found.coverage_EH
        learned = self.memory.learn(error_SRKH, found.severity_E, before_SRKX, usable_SRK, self.ledger.root_SR)
        sizes = (rms(x_EH).squeeze(-1) for x_EH in (found.distribution_EH, found.coverage_EH))
        value_XSRK = torch.stack((learned.cosine_SRK, *sizes, found.severity_E))
        counts_XSRK = torch.stack((learned.compared_SRK, *(usable_SRK,) * (len(_MEANS) - 1)))
        counts_XSRK &= value_XSRK.abs() < torch.inf
        self._sum_X = self._sum_X + value_XSRK.where(counts_XSRK, 0.0).flatten(1).sum(1)
        self._count_X = self._count_X + counts_XSRK.flatten(1).sum(1)

    def measures(self) -> dict[str, float]:
        """Since the last call: how open gates were (mean over proposals); of what was learned from, where there was
        any, the mean cosine of errors and what was remembered, RMS of both errors, and severity; and how many entries
        have matured and were dropped."""
        entries_2 = torch.stack((self.ledger.matured, self.ledger.dropped)) - torch.stack(self._told)
        told = torch.cat((self._open[None], entries_2, self._sum_X, self._count_X)).tolist()
        sums, counts = told[3 : 3 + len(_MEANS)], told[3 + len(_MEANS) :]
        found = {"reflex_open": told[0] / self._gates if self._gates else 0.0}
        found |= {f"reflex_{name}": s / n for name, s, n in zip(_MEANS, sums, counts, strict=True) if n}
        found |= {"reflex_matured": told[1], "reflex_dropped": told[2]}
        self._forget_measures()
        return found


class HiddenRecall:
    """One round's corrections, and what is proposed with them."""

    def __init__(self, push_SKH: Tensor, temperature: float) -> None:
        self._push_SKH, self.temperature = push_SKH, temperature
        self._slots: list[Tensor] = []
        self._logqs: list[Tensor] = []

    def states(self, state_SkH: Tensor, stage: slice) -> Tensor:
        return torch.addcmul(state_SkH, rms(state_SkH), self._push_SKH[:, stage])

    def logits_(self, logits_SkU: Tensor) -> Tensor:
        return logits_SkU  # its work is done by `states`

    def compared(self, logits_SU: Tensor) -> None:
        """Its gate learns from alignment."""

    def proposed(self, logits_SkU: Tensor, slot_SkC: Tensor) -> None:
        logz_Sk1 = logits_SkU.logsumexp(-1, keepdim=True)
        likely_SkT, place_SkT = logits_SkU.topk(min(LIKELIEST, logits_SkU.shape[-1]), dim=-1)
        self._slots.append(torch.cat((slot_SkC, place_SkT), dim=-1))
        self._logqs.append(torch.cat((logits_SkU.gather(-1, slot_SkC), likely_SkT), dim=-1) - logz_Sk1)

    def follow(self, token_S: Tensor) -> None:
        """Each horizon has its own memory, whatever the path."""

    def entries(self, vocabulary_U: Tensor | None, sketch_SKX: Tensor) -> tuple[Tensor, Tensor]:
        """What the ledger keeps of each horizon: the known tokens, and their log q with the memory's sketch."""
        slot_SKM, logq_SKM = torch.cat(self._slots, dim=1), torch.cat(self._logqs, dim=1)
        token_SKM = slot_SKM if vocabulary_U is None else vocabulary_U.take(slot_SKM)
        return token_SKM, torch.cat((logq_SKM, sketch_SKX), dim=-1)
