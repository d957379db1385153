"""The nouns of the engine: everything that one round hands to the next, declared once.

Knows nothing of models, proposers or trainers, and imports nothing of specroll.

Shape legend, used as suffixes everywhere in the package:
    S  running sequences            N  packed tree tokens of one round (roots included)
    V  vocabulary                   H  hidden width
    K  horizons (heads)             C  candidates (of a horizon, or kept by truncation)
    T  tokens of one sequence       D  depth of a tree
    M  nodes of a round or draft, before they are packed (roots not included)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
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
class RunningText:
    """A sequence on the host. `token_ids`, its response so far with the root, is one list from beginning to end, which
    the engine goes on appending to: for reading only."""

    prompt_ids: tuple[int, ...]
    token_ids: Sequence[int]
    sample: int


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
    texts: Sequence[RunningText] | None = None
    """The same on the host, by sequence."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidates per horizon: `token_SKC[s, k]` may follow the root of `s` at distance k + 1, best first.

    `score_SKC` is the unnormalised log-score that ranked them (log q, plus the noise where it is used);
    `hit_SKC` the calibrated probability that the target draws the candidate, given that the path of each horizon's best
    candidates leads there and was right; `aside_SKC` the same for another path (None: no less), in the same order and
    never above `hit_SKC`. Of the first horizon's best candidate, `trial_2S` is what it is with Reflex and without it,
    where these are to be compared, and `lean_S` what the heads alone say, where that is watched and Reflex adds to it.
    """

    token_SKC: Tensor
    score_SKC: Tensor
    hit_SKC: Tensor
    aside_SKC: Tensor | None = None
    trial_2S: Tensor | None = None
    lean_S: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Branches:
    """Explicit trees as a draft: row s holds nodes that may follow the root of `s`, in places 0 to M - 1.

    `parent_SM` is the place of a node's parent in the same row, before its own, or -1 for a child of the root.
    `hit_SM` is the calibrated probability that the target draws the node given that it drew the node's parent; where
    it is 0 or not a number there is no node, nor any behind it. Children of one parent must have distinct tokens.
    """

    token_SM: Tensor  # int64
    parent_SM: Tensor  # int64
    hit_SM: Tensor  # float


@dataclass(frozen=True, slots=True)
class Tree:
    """Packed trees of all running sequences, sorted by sequence; row 0 of each sequence is its root.

    `parent_N` indexes the packed rows (a root is its own parent); `slot_N` counts rows inside a sequence from 0;
    `rank_N` says what the draft calls a node: its rank within its horizon, or its place in `Branches` (0 for roots).
    What `observe` is told of may hold nodes of other drafts as well: their rank is -1.
    """

    token_N: Tensor
    parent_N: Tensor
    depth_N: Tensor
    sequence_N: Tensor
    slot_N: Tensor
    rank_N: Tensor
    size: int  # most rows of one sequence, root included; a sequence may have fewer
    max_depth: int

    def root_S(self, sequences: int) -> Tensor:
        """The rows of so many sequences' roots."""
        return torch.searchsorted(self.sequence_N, torch.arange(sequences, device=self.sequence_N.device))


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
    horizons: int

    @property
    def version(self) -> int:
        """Another one means that what was learned of its worth counts little."""
        ...

    @property
    def fitted(self) -> bool:
        """Whether it was fitted to the policy's own samples: then it is tried at once, and else a little at first."""
        ...

    @property
    def reads_past(self) -> bool:
        """Whether it looks at `Features.past_SL`, which is None where it does not."""
        ...

    def propose(self, features: Features) -> Draft | Branches: ...

    def observe(self, draft: Any, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """What became of `draft`, which it proposed itself, in the tree that was planted of it.

        `out`, the pass that the verdict is of, may be read but not kept; None where responses are only replayed.
        """
        ...


@runtime_checkable
class Follower(Protocol):
    """A proposer with a state of its own for every slot, which is told all that happens to slots, in plain rounds too.

    Slot s is that of the s-th running sequence, as in `Features`. A proposer without these methods costs nothing here.
    If it has `slot_bytes(length)`, memory is reckoned with that for each slot of so many tokens.
    """

    def begin(self, slots: int, length: int) -> None:
        """A rollout begins, of at most `slots` sequences at once and `length` tokens each, proposed ones included."""
        ...

    def read(self, token_P: Sequence[int], hidden_PH: Tensor) -> Any:
        """A prompt was run and left these last hidden states. What is returned goes to `admit` with all its group."""
        ...

    def admit(self, read: Any, root: int) -> None:
        """The next slot goes to a response, whose first token is drawn, to a prompt that was `read`."""
        ...

    def keep(self, hidden_NH: Tensor, token_N: Tensor, counts: Sequence[int]) -> None:
        """A round's kept rows, sequence by sequence, `counts` of each: the state that a row left, and what it drew."""
        ...

    def retire(self, source: Sequence[int]) -> None:
        """Responses have ended: slot s now belongs to the sequence that was in slot `source[s]`, others are gone."""
        ...


@runtime_checkable
class Listener(Protocol):
    """A proposer that wants to hear of each response that has ended, whether anything was proposed for it or not."""

    def ended(self, text: RunningText) -> None: ...


@runtime_checkable
class Several(Protocol):
    """A proposer that asks others, of which one that is faulty is left out while the others go on."""

    @property
    def faults(self) -> int:
        """How often one of them has failed."""
        ...

    @property
    def disabled(self) -> bool:
        """Whether none of them is asked any more."""
        ...

    def sound(self, draft: Any) -> Tensor:
        """Whether all that they proposed for `draft` could be verified: a bool on its device.

        What could not is not in it.
        """
        ...

    def blame(self, draft: Any) -> None:
        """Something could not: tell whose it was, and what is wrong with it."""
        ...
