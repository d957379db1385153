"""What followed a sequence's matches, as a tree: which tokens, how often, behind how long an agreement.

The share of a token is its conditional probability by counts, with back-off to shorter agreements: of C_n matches of at
least n tokens, c_n(v) were followed by v, and

    share_n(v) = (c_n(v) + K share_{n-1}(v)) / (C_n + K),    share_0 = 0,

so that what a family lacks to 1 is the share of tokens that never followed. A match of n tokens at the root is one of
n + d at a node of depth d, as the path to it agrees too.

    X  matches    D  tokens that followed    U  tokens that followed, of all matches    B  nodes of all sequences
    F  families: the nodes of one parent    G  grades of agreement
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from specroll.propose.suffix_index import LONGEST, Matches

GRADES = (1, 2, 3, 4, 6, 8, 12)
"""The fewest tokens that must agree, by grade."""
BACK_OFF = 2.0
"""K: how many matches a shorter agreement's share is worth."""

_GRADE_OF = np.searchsorted(GRADES, np.arange(LONGEST + 1), side="right") - 1
_FACTOR, _WORD = 0x5851F42D4C957F2D, 0x14057B7EF767814F
"""Odd numbers, which make a path its code."""


class Trie(NamedTuple):
    """Nodes by depth, those of one family side by side. A parent is -1 (the root) or an index into B."""

    sequence_B: np.ndarray
    parent_B: np.ndarray
    depth_B: np.ndarray  # from 1
    token_B: np.ndarray
    share_B: np.ndarray
    family_B: np.ndarray
    first_F: np.ndarray  # each family's first node
    grade_F: np.ndarray  # of its longest match
    levels: list[slice]  # the nodes of depth 1, 2, ..


def grow_trie(matches: Matches) -> Trie | None:
    """The tree of all that followed; None where nothing did. A family's tokens are distinct.

    A node is a path behind a sequence's root, and known by a code of 64 bits: two paths of one code will not happen,
    and would cost a node if they did, no token.
    """
    match_U, depth_U = np.nonzero(matches.next_XD >= 0)
    if not match_U.size:
        return None
    some_B, node_U = _distinct(_codes(matches)[match_U, depth_U])
    nodes, sequences = some_B.size, int(matches.sequence_X[-1]) + 1
    # What precedes a token in U is the one before it in the same match; roots are numbered behind the nodes.
    sequence_B, depth_B = matches.sequence_X[match_U[some_B]], depth_U[some_B]
    parent_B = np.where(depth_B > 0, node_U[some_B - 1], nodes + sequence_B)
    family_B = depth_B * (nodes + sequences) + parent_B
    order_B = family_B.argsort()
    family_B, sequence_B, depth_B, some_B = (x_B[order_B] for x_B in (family_B, sequence_B, depth_B, some_B))
    place_B = np.full(nodes + sequences, -1)
    place_B[order_B] = np.arange(nodes)
    starts_B = _starts(family_B)
    first_F, family_B = np.flatnonzero(starts_B), starts_B.cumsum() - 1
    grade_U = _GRADE_OF[np.minimum(matches.length_X[match_U] + depth_U, LONGEST)]
    share_B, grade_F = _shares(place_B[node_U] * len(GRADES) + grade_U, nodes, first_F, family_B)
    ends_D = np.searchsorted(depth_B, np.arange(depth_B[-1] + 1), side="right").tolist()
    return Trie(
        sequence_B,
        place_B[parent_B[order_B]],
        depth_B + 1,
        matches.next_XD[match_U[some_B], depth_B],
        share_B,
        family_B,
        first_F,
        grade_F,
        [slice(start, end) for start, end in pairwise((0, *ends_D))],
    )


def _distinct(code_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each code stands, anywhere, and which of them each is (np.unique, but for its stable sort)."""
    order_U = code_U.argsort()
    starts_U = _starts(code_U[order_U])
    node_U = np.empty_like(order_U)
    node_U[order_U] = starts_U.cumsum() - 1
    return order_U[starts_U], node_U


def _starts(sorted_B: np.ndarray) -> np.ndarray:
    """Whether an entry differs from the one before."""
    starts_B = np.ones(sorted_B.size, dtype=bool)
    np.not_equal(sorted_B[1:], sorted_B[:-1], out=starts_B[1:])
    return starts_B


def _codes(matches: Matches) -> np.ndarray:
    """Of what followed each match up to each token, and whose sequence it was, as numbers that wrap."""
    power_D = np.multiply.accumulate(np.full(matches.next_XD.shape[1], _FACTOR, dtype=np.uint64))
    word_XD = (matches.next_XD + 1).astype(np.uint64) * power_D
    return word_XD.cumsum(axis=1) + (matches.sequence_X.astype(np.uint64) * np.uint64(_WORD))[:, None]


def _shares(pair_U: np.ndarray, nodes: int, first_F: np.ndarray, family_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nodes' shares, and the families' grades, from a node and a grade of each token. The recursion written out:

    share = sum_n c_n(v) / K * prod_{m >= n} K / (C_m + K)
    """
    of_grade_BG = np.bincount(pair_U, minlength=nodes * len(GRADES)).reshape(nodes, len(GRADES))
    count_BG = of_grade_BG[:, ::-1].cumsum(axis=1)[:, ::-1]  # of this grade or better
    count_FG = np.add.reduceat(count_BG, first_F, axis=0)
    left_FG = (BACK_OFF / (count_FG + BACK_OFF))[:, ::-1].cumprod(axis=1)[:, ::-1]
    share_B = np.einsum("bg,bg->b", count_BG, left_FG[family_B]) / BACK_OFF
    return share_B, (count_FG > 0).sum(axis=1) - 1
