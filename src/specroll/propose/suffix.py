"""Proposals that need no network: what followed the last tokens before, in other responses to the same prompt.

A prompt's siblings that run now, earlier responses to it, the prompt and the trajectory itself: where any of them had
the same last tokens, what it went on with is proposed, as a tree. Where the target draws with noise, a token's share of
the continuations is not its chance: the draw is the argmax of log p + g, with g known. With q the share, s = log q + g,
and all tokens that never followed taken together as one of share 1 - Q, whose own s is a Gumbel variable,

    raw(v) = exp(s_v) / sum_u exp(s_u) * exp(-(1 - Q) exp(-s_v)),

which hits and misses calibrate. Everything here is on the host; the engine tells of its texts by `Features.texts` and
`ended`.

    S  sequences    M  nodes of a sequence    B  nodes of all sequences    F  families
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specroll import noise
from specroll.propose import kept
from specroll.propose.hits import BinnedHits, outcomes
from specroll.propose.suffix_index import Group, IndexedText, SuffixIndex
from specroll.propose.suffix_store import ResponseStore
from specroll.propose.suffix_trie import GRADES, Trie, grow_trie
from specroll.types import Branches, Features, RunningText, TargetOutput, Tree, Verdict

FILE = "suffixes.safetensors"
_LEAST_GAIN = 0.01
"""A node that the draws reach more seldom is worth no row of any pass."""
MOST_NODES = 16
"""Of a sequence: those that its draws reach soonest. No tree of ours is larger by default."""
_KEYS = 64  # positions of a text whose noise is made ready, at least
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # of raw probabilities: these and the grade make a bin


@dataclass(frozen=True, slots=True)
class SuffixBranches(Branches):
    """Proposals, and what their hits were computed from."""

    raw_SM: Tensor
    bin_SM: Tensor


class SuffixProposer:
    """What followed before, with calibrated hits. Finished responses are kept, across rollouts and epochs.

    `save` and `load` carry them and the calibration over to another process.
    """

    name = "suffix"
    version = 0
    fitted = True  # what it repeats is the policy's own
    reads_past = False  # texts on the host are all it asks for

    def __init__(self, *, max_tokens: int = 4_000_000, depth: int = 8) -> None:
        """
        Args:
            max_tokens: of finished responses, all prompts together; 4 bytes each, the oldest are dropped first.
            depth: most tokens that are proposed behind a root.

        Raises ValueError for a bound below 1.
        """
        if depth < 1:
            raise ValueError(f"a proposal needs at least one token, got depth={depth}")
        self.horizons = depth
        self.store = ResponseStore(max_tokens)
        self.hits = _fresh_hits()
        self._index = SuffixIndex(depth)
        self._groups: dict[tuple[int, ...], Group] = {}  # of the prompts that run now
        self._running: dict[int, _Followed] = {}  # by sample
        self._word_V = np.empty(0, dtype=np.int32)  # of tokens, as noise mixes them

    def propose(self, features: Features) -> SuffixBranches:
        running = self._follow(features.texts or ())
        trie = grow_trie(self._index.look_up([(text.group, text.indexed) for text in running]))
        if trie is None:
            none = features.root_S.numel(), 0
            return _branches(np.zeros((3, *none), dtype=np.int64), np.zeros((2, *none)), features.root_S.device)
        raw_B = trie.share_B if features.sampling.temperature == 0 else self._raw(trie, running, features.sampling.seed)
        bin_B = trie.grade_F[trie.family_B] * (len(_EDGES) + 1) + np.searchsorted(_EDGES, raw_B)
        hit_B = self.hits.hit(torch.from_numpy(raw_B), torch.from_numpy(bin_B)).numpy()
        return _packed(trie, hit_B, raw_B, bin_B, features.root_S)

    def observe(self, draft: SuffixBranches, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        if self.hits.due():
            known_SM, drawn_SM = outcomes(draft, tree, verdict)
            self.hits.observe(draft.raw_SM, draft.bin_SM, known_SM.cpu(), drawn_SM.cpu())

    def ended(self, text: RunningText) -> None:
        """Keep a finished response, for its siblings that still run and for later ones."""
        self.store.add(text.prompt_ids, text.token_ids)
        if text.prompt_ids in self._groups:
            self._followed(text, self._running.pop(text.sample, None))

    def save(self, folder: str | Path) -> None:
        """Write what finished responses and hits have taught, as one safetensors file in a folder."""
        kept.write(Path(folder) / FILE, self.name, self.store.state_dict() | self.hits.state_dict())

    def load(self, folder: str | Path) -> None:
        """Take over what `save` wrote. Raises ValueError for a file that is missing, damaged or of another format."""
        path = Path(folder) / FILE
        tensors, _ = kept.read(path, self.name)
        hits, store = _fresh_hits(), ResponseStore(self.store.max_tokens)
        try:
            hits.load_state_dict(tensors)
            store.load_state_dict(tensors)
        except ValueError as error:
            raise ValueError(f"{path} holds no usable suffixes: {error}; delete it to start without them") from error
        self.hits, self.store = hits, store

    def _raw(self, trie: Trie, running: Sequence[_Followed], seed: int) -> np.ndarray:
        """How likely each node is drawn at its parent, as far as shares and noise tell."""
        most = int(trie.token_B.max())
        if most >= self._word_V.size:
            self._word_V = noise.token_words(torch.arange(2 * most + 1)).numpy()
        key_SD2 = np.stack([text.keys(seed, self.horizons) for text in running])
        key_B2, word_B = key_SD2[trie.sequence_B, trie.depth_B - 1], self._word_V[trie.token_B]
        noise_B1 = noise.gumbel_of_keys(torch.from_numpy(key_B2), torch.from_numpy(word_B[:, None]))
        weight_B = trie.share_B * np.exp(noise_B1.numpy()[:, 0].astype(np.float64))
        total_F, share_F = (np.add.reduceat(x, trie.first_F) for x in (weight_B, trie.share_B))
        unseen_B = np.maximum(1.0 - share_F, 0.0)[trie.family_B]
        return weight_B / total_F[trie.family_B] * np.exp(-unseen_B / weight_B)

    def _follow(self, texts: Sequence[RunningText]) -> list[_Followed]:
        """The running texts, indexed as far as they are. Prompts of which none runs any more are closed."""
        before = self._running
        self._running = {text.sample: self._followed(text, before.get(text.sample)) for text in texts}
        running = list(self._running.values())
        if len({id(text.group) for text in running}) < len(self._groups):
            alive = {text.group.prompt_ids for text in running}
            for prompt_ids in self._groups.keys() - alive:
                self._index.close(self._groups.pop(prompt_ids))
        return running

    def _followed(self, text: RunningText, before: _Followed | None) -> _Followed:
        if before is None or before.token_ids is not text.token_ids:
            group = self._groups.get(text.prompt_ids)
            if group is None:
                group = self._index.open(text.prompt_ids, self.store.of(text.prompt_ids))
                self._groups[text.prompt_ids] = group
            before = _Followed(text.token_ids, text.sample, group, self._index.begin(group))
        self._index.extend(before.group, before.indexed, text.token_ids[before.known :])
        before.known = len(text.token_ids)
        return before


@dataclass(slots=True)
class _Followed:
    """A running text, and how much of it is indexed."""

    token_ids: Sequence[int]  # the engine's own list, which tells this text from another of the same sample
    sample: int
    group: Group
    indexed: IndexedText
    known: int = 0
    _seed: int | None = None
    _key_P2: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))

    def keys(self, seed: int, depth: int) -> np.ndarray:
        """`noise.row_keys` of the next so many positions, made for many at once."""
        if self.known + depth > len(self._key_P2) or seed != self._seed:
            self._seed = seed
            position_P = len(self.group.prompt_ids) + torch.arange(2 * (self.known + depth) + _KEYS)
            self._key_P2 = noise.row_keys(seed, torch.full_like(position_P, self.sample), position_P).numpy()
        return self._key_P2[self.known : self.known + depth]


def _fresh_hits() -> BinnedHits:
    return BinnedHits(len(GRADES) * (len(_EDGES) + 1))


def _packed(trie: Trie, hit_B: np.ndarray, raw_B: np.ndarray, bin_B: np.ndarray, root_S: Tensor) -> SuffixBranches:
    """Each sequence's nodes that are worth a row, best first: a parent is worth more than its children."""
    gain_B = hit_B.copy()
    for level in trie.levels[1:]:
        gain_B[level] *= gain_B[trie.parent_B[level]]
    order_B = np.lexsort((-gain_B, trie.sequence_B))
    nodes_S = np.bincount(trie.sequence_B, minlength=root_S.numel())
    rank_B = np.arange(order_B.size) - np.repeat(nodes_S.cumsum() - nodes_S, nodes_S)
    fits_B = (rank_B < MOST_NODES) & (gain_B[order_B] >= _LEAST_GAIN)
    kept_B, rank_B = order_B[fits_B], rank_B[fits_B]
    place_B = np.full(gain_B.size + 1, -1)  # in its sequence; the root's is the last, which -1 names as well
    place_B[kept_B] = rank_B
    whole_3SM = np.zeros((3, root_S.numel(), int(rank_B.max(initial=-1)) + 1), dtype=np.int64)
    real_2SM = np.zeros((2, *whole_3SM.shape[1:]))
    at = slice(None), trie.sequence_B[kept_B], rank_B
    whole_3SM[at] = trie.token_B[kept_B], place_B[trie.parent_B[kept_B]], bin_B[kept_B]
    real_2SM[at] = hit_B[kept_B], raw_B[kept_B]
    return _branches(whole_3SM, real_2SM, root_S.device)


def _branches(whole_3SM: np.ndarray, real_2SM: np.ndarray, device: torch.device) -> SuffixBranches:
    """Of tokens, parents and bins, and of hits and raw probabilities."""
    (token_SM, parent_SM, bin_SM), (hit_SM, raw_SM) = torch.from_numpy(whole_3SM), torch.from_numpy(real_2SM)
    return SuffixBranches(token_SM.to(device), parent_SM.to(device), hit_SM.to(device), raw_SM, bin_SM)
