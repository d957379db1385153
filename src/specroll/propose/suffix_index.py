"""Where a prompt's texts have had the same last tokens before, and what followed there.

Holds the texts of the prompts that are running now: each prompt, earlier responses to it, and the responses in the
making, as far as they are. A text lies in one row of a table, its prompt's last tokens before it; a place is a token of
a text that another one follows. For each prompt by itself, places are found by the tokens that end there. Nothing of
another prompt is ever looked at.

    T  rows of the table    L  its columns    S  sequences asked about    X  places found    D  tokens that followed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

LONGEST = 16
"""Tokens that are compared backwards from a place."""
_ORDERS = (6, 3, 1)  # places are kept by their last so many tokens, and looked up by the most first
MOST_PLACES = 24
"""Of a sequence: those that agree longest, of equal ones the latest."""
_COLUMN_BITS = 24
_NOTHING = -1  # pads the table


class Matches(NamedTuple):
    """Places where the sequences' last tokens stood before, sorted by sequence."""

    sequence_X: np.ndarray
    length_X: np.ndarray  # last tokens that agree, 1 to LONGEST
    next_XD: np.ndarray  # the tokens that followed, -1 behind the text's end


@dataclass(slots=True)
class IndexedText:
    """A row of the table, and where in it the text ends."""

    row: int
    end: int  # the column behind its last token
    tail: list[int]  # its last tokens, the prompt's before them, as many as places are looked up by


@dataclass(slots=True)
class Group:
    """The texts of one prompt. `places` maps last tokens to the places (row and column as one number) they end at."""

    prompt_ids: tuple[int, ...]
    places: defaultdict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    rows: list[int] = field(default_factory=list)

    def find(self, tail: list[int]) -> list[int]:
        """Places that end like `tail`: the longest agreements first, of equal ones the latest."""
        found: dict[int, None] = {}
        for order in _ORDERS:
            if len(tail) >= order and len(found) < MOST_PLACES:
                found.update(dict.fromkeys(reversed(self.places.get(tuple(tail[-order:]), ())[-MOST_PLACES:])))
        return list(found)[:MOST_PLACES]


class SuffixIndex:
    """All groups' texts in one table."""

    def __init__(self, depth: int) -> None:
        """`depth`: tokens to be read after a place."""
        self.depth = depth
        self._token_TL = np.full((64, 256), _NOTHING, dtype=np.int32)
        self._free = list(range(64))

    def open(self, prompt_ids: Sequence[int], earlier: Sequence[Sequence[int]] = ()) -> Group:
        """A prompt, with responses that were given to it earlier."""
        group = Group(tuple(prompt_ids))
        self.extend(group, self._row(group), group.prompt_ids)
        for response in earlier:
            self.extend(group, self.begin(group), response)
        return group

    def close(self, group: Group) -> None:
        """Forget a prompt and its texts."""
        self._token_TL[group.rows] = _NOTHING
        self._free += group.rows

    def begin(self, group: Group) -> IndexedText:
        """A new text behind the prompt."""
        text = self._row(group)
        before = group.prompt_ids[-LONGEST:]
        self._token_TL[text.row, text.end - len(before) : text.end] = before
        text.tail = list(before[-_ORDERS[0] :])
        return text

    def extend(self, group: Group, text: IndexedText, token_ids: Sequence[int]) -> None:
        """More tokens of a text: what precedes them is a place now."""
        self._make_room(columns=text.end + len(token_ids) + self.depth)
        self._token_TL[text.row, text.end : text.end + len(token_ids)] = token_ids
        recent = [*text.tail, *token_ids]
        place = (text.row << _COLUMN_BITS) + text.end - 1
        for end in range(len(text.tail), len(recent)):
            for order in _ORDERS:
                if order <= end:
                    group.places[tuple(recent[end - order : end])].append(place)
            place += 1
        text.end += len(token_ids)
        text.tail = recent[-_ORDERS[0] :]

    def look_up(self, texts: Sequence[tuple[Group, IndexedText]]) -> Matches:
        """The places that each text's last tokens agree with."""
        found = [group.find(text.tail) for group, text in texts]
        place_X = np.array([place for places in found for place in places], dtype=np.int64)
        sequence_X = np.repeat(np.arange(len(texts)), np.array([len(places) for places in found], dtype=np.int64))
        columns = self._token_TL.shape[1]
        at_X = (place_X >> _COLUMN_BITS) * columns + (place_X & ((1 << _COLUMN_BITS) - 1))
        own_S = np.array([text.row * columns + text.end - 1 for _, text in texts], dtype=np.int64)
        back, flat = np.arange(LONGEST), self._token_TL.reshape(-1)
        own_SB = flat[own_S[:, None] - back]
        agrees_XB = (flat[at_X[:, None] - back] == own_SB[sequence_X]) & (own_SB[sequence_X] != _NOTHING)
        return Matches(
            sequence_X,
            np.logical_and.accumulate(agrees_XB, axis=1).sum(axis=1),
            flat[at_X[:, None] + np.arange(1, self.depth + 1)],
        )

    def _row(self, group: Group) -> IndexedText:
        if not self._free:
            rows = self._token_TL.shape[0]
            more_TL = np.full_like(self._token_TL, _NOTHING)
            self._token_TL = np.concatenate((self._token_TL, more_TL))
            self._free = list(range(rows, 2 * rows))
        group.rows.append(self._free.pop())
        return IndexedText(group.rows[-1], LONGEST, [])

    def _make_room(self, columns: int) -> None:
        rows, present = self._token_TL.shape
        if columns > present:
            more_TL = np.full((rows, max(present, columns - present)), _NOTHING, dtype=np.int32)
            self._token_TL = np.concatenate((self._token_TL, more_TL), axis=1)
