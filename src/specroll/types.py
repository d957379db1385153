"""The nouns of the engine: everything that one round hands to the next, declared once.

Knows nothing of models, proposers or trainers, and imports nothing of specroll.

Shape legend, used as suffixes everywhere in the package:
    S  running sequences            N  packed tree tokens of one round (roots included)
    V  vocabulary                   H  hidden width
    K  horizons (heads)             C  candidates (of a horizon, or kept by truncation)
    T  tokens of one sequence       D  depth of a tree
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The law that tokens are drawn from, in transformers' order: temperature, top-k, top-p, min-p.

    `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` switch a truncation off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and >= 0 (0 = greedy), got {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number >= 0 (0 = off), got {self.top_k}")
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed must be a whole number of 64 bits, got {self.seed}; take it modulo 2**64")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1] (1 = off), got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1] (0 = off), got {self.min_p}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to sample. `sample` names its noise: unique over prompts, group members, steps and ranks."""

    prompt_ids: tuple[int, ...]
    sample: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a request became. The lists run over the emitted tokens, an EOS included as the last one.

    `logp_raw` is log p at temperature 1 without truncation; `logp` is of the processed law that was sampled from;
    `kept_mass` is the probability that truncation kept (at the given temperature), so the three let a trainer use
    either convention.
    """

    sample: int
    token_ids: list[int]
    logp_raw: list[float]
    logp: list[float]
    kept_mass: list[float]
    finish_reason: FinishReason
    policy_version: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What one finished response teaches a proposer. Index i is the i-th emitted token; all tensors on the CPU.

    `hidden_TH[i]` drew `token_T[i]` from the law whose likeliest candidates are `top_token_TC[i]` with processed
    log-probabilities `top_logp_TC[i]` (-inf pads). So horizon k learns (hidden[i], token[i .. i+k-1]) -> law at i + k.
    """

    hidden_TH: Tensor  # the policy's dtype
    token_T: Tensor  # int64
    top_token_TC: Tensor  # int64
    top_logp_TC: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Draws:
    """One draw of the target's law per packed row, by `sampling.draw`."""

    token_N: Tensor  # int64
    logp_raw_N: Tensor  # float32
    logp_N: Tensor  # float32
    kept_mass_N: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Features:
    """What a proposer may look at: per running sequence, the state that drew its root, and the root itself."""

    hidden_SH: Tensor  # the target's last hidden state (what lm_head sees) at the position before the root
    root_S: Tensor  # int64, drawn but not yet run through the target
    sample_S: Tensor  # int64
    position_S: Tensor  # int64, the root's position in its sequence
    sampling: SamplingParams  # the law of this rollout: its seed and temperature serve noise-ranked proposals
    past_SL: Tensor | None = None
    """int64, tokens of prompt and response by position, the root's included; what lies behind it is undefined."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidates per horizon: `token_SKC[s, k]` may follow the root of `s` at distance k + 1, best first.

    `score_SKC` is the unnormalised log-score that ranked them (log q, plus the noise where it is used);
    `hit_SKC` the calibrated probability that the target draws the candidate, given that the path of each horizon's best
    candidates leads there and was right; `aside_SKC` the same for another path (None: no less), in the same order and
    never above `hit_SKC`. `trial_2S` is the first horizon's best candidate with Reflex and without it, where these
    are to be compared.
    """

    token_SKC: Tensor
    score_SKC: Tensor
    hit_SKC: Tensor
    aside_SKC: Tensor | None = None
    trial_2S: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """Packed trees of all running sequences, sorted by sequence; row 0 of each sequence is its root.

    `parent_N` indexes the packed rows (a root is its own parent); `slot_N` counts rows inside a sequence from 0;
    `rank_N` is the candidate's rank within its horizon (0 for roots).
    """

    token_N: Tensor
    parent_N: Tensor
    depth_N: Tensor
    sequence_N: Tensor
    slot_N: Tensor
    rank_N: Tensor
    size: int  # most rows of one sequence, root included; a sequence may have fewer
    max_depth: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own draw at every node, and which nodes lie on the path that those draws follow."""

    draws: Draws
    accepted_N: Tensor  # bool, roots always


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """One forward pass of the target over packed rows."""

    logits_NV: Tensor
    hidden_NH: Tensor


@dataclass(slots=True)
class RoundStats:
    """One round. Times in seconds by stage; `accepted_by_depth[d]` counts sequences whose path reached depth d + 1."""

    running: int
    proposed: int = 0
    emitted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    proposed_by_depth: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Proposer(Protocol):
    """Two verbs: propose, then be told what happened. A proposer can make a rollout slow, never wrong.

    A class needs no more than the verbs: what else it leaves out, `guard.completed` puts in.
    """

    name: str
    version: int
    horizons: int

    @property
    def fitted(self) -> bool:
        """Whether it was fitted to the policy's own samples: then it is tried at once, and else a little at first."""
        ...

    @property
    def reads_past(self) -> bool:
        """Whether it looks at `Features.past_SL`, which is None where it does not."""
        ...

    def propose(self, features: Features) -> Draft: ...

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """`out`, the pass that the verdict is of, may be read but not kept; None where responses are only replayed."""
        ...
