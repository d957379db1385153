"""What followed a sequence's matches, as a tree: which tokens, how often, behind how long an agreement.

The share of a token is its conditional probability by counts, with back-off to shorter agreements: of C_n matches of at
least n tokens, c_n(v) were followed by v, and

    share_n(v) = (c_n(v) + K share_{n-1}(v)) / (C_n + K),    share_0 = 0,

so that what a family lacks to 1 is the share of tokens that never followed. A match of n tokens at the root is one of
n + d at a node of depth d, as the path to it agrees too.

    X  matches    B  nodes of all sequences    F  families: the nodes of one parent    G  grades of agreement
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specroll.propose.suffix_index import LONGEST, Matches

GRADES = (1, 2, 3, 4, 6, 8, 12)
"""The fewest tokens that must agree, by grade."""
BACK_OFF = 2.0
"""K: how many matches a shorter agreement's share is worth."""

_GRADE_OF = np.searchsorted(GRADES, np.arange(LONGEST + 1), side="right") - 1
_TOKEN_BITS = 32


class Trie(NamedTuple):
    """Nodes by depth, those of one family side by side. A parent is -1 (the root) or an index into B."""

    sequence_B: np.ndarray
    parent_B: np.ndarray
    token_B: np.ndarray
    share_B: np.ndarray
    family_B: np.ndarray
    first_F: np.ndarray  # each family's first node
    grade_F: np.ndarray  # of its longest match
    levels: list[slice]  # the nodes of depth 1, 2, ..


def grow_trie(matches: Matches) -> Trie | None:
    """The tree of all that followed; None where nothing did. A family's tokens are distinct."""
    sequence_X, length_X, next_XD = matches
    node_X, nodes = -1 - sequence_X, 0  # roots are numbered from -1 down, nodes from 0 up
    sequences, parents, tokens, levels, pairs = [], [], [], [], []
    for depth in range(next_XD.shape[1]):
        on_X = next_XD[:, depth] >= 0
        if not on_X.any():
            break
        sequence_X, length_X, next_XD, node_X = sequence_X[on_X], length_X[on_X], next_XD[on_X], node_X[on_X]
        key_B, first_B, child_X = np.unique(
            (node_X << _TOKEN_BITS) + next_XD[:, depth], return_index=True, return_inverse=True
        )
        sequences.append(sequence_X[first_B])
        parents.append(key_B >> _TOKEN_BITS)
        tokens.append(key_B & ((1 << _TOKEN_BITS) - 1))
        levels.append(slice(nodes, nodes + key_B.size))
        node_X = nodes + child_X
        nodes += key_B.size
        pairs.append(node_X * len(GRADES) + _GRADE_OF[np.minimum(length_X + depth, LONGEST)])
    if not levels:
        return None
    sequence_B, parent_B, token_B = np.concatenate(sequences), np.concatenate(parents), np.concatenate(tokens)
    starts_B = np.append(True, parent_B[1:] != parent_B[:-1])
    first_F, family_B = np.flatnonzero(starts_B), starts_B.cumsum() - 1
    of_grade_BG = np.bincount(np.concatenate(pairs), minlength=nodes * len(GRADES)).reshape(nodes, len(GRADES))
    count_BG = of_grade_BG[:, ::-1].cumsum(axis=1)[:, ::-1]  # of this grade or better
    count_FG = np.add.reduceat(count_BG, first_F, axis=0)
    return Trie(
        sequence_B,
        np.maximum(parent_B, -1),
        token_B,
        _shares(count_BG, count_FG[family_B]),
        family_B,
        first_F,
        (count_FG > 0).sum(axis=1) - 1,
        levels,
    )


def _shares(count_BG: np.ndarray, of_BG: np.ndarray) -> np.ndarray:
    share_B = np.zeros(len(count_BG))
    for count_B, of_B in zip(count_BG.T, of_BG.T, strict=True):
        share_B = (count_B + BACK_OFF * share_B) / (of_B + BACK_OFF)
    return share_B
