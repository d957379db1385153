"""When a sequence ends: an end-of-sequence token, a stop string, or its own length limit. Nothing past it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specroll.types import FinishReason


class Decodes(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


class StopRule:
    """Finds the first token at which a response ends, also inside an accepted path."""

    def __init__(self, eos_ids: Sequence[int], stop: Sequence[str], tokenizer: Decodes | None) -> None:
        """`stop` strings need a tokenizer; a response ends with the token that completes one."""
        if isinstance(stop, str) or any(not s for s in stop):
            raise ValueError(f"stop must be a list of non-empty strings, got {stop!r}")
        if stop and tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer to be found: pass one to the engine, or give no stop strings"
            )
        self.eos_ids = frozenset(eos_ids)
        self.stop, self._tokenizer = tuple(stop), tokenizer
        # A token may end in the middle of a character, so a few more tokens than characters are decoded.
        self._window = max((len(s) for s in stop), default=0) + 8

    def cut(self, emitted: list[int], new: list[int], limit: int) -> tuple[int, FinishReason | None]:
        """How many of the `new` tokens are emitted after `emitted`, and why the response ends there, if it does."""
        for i, token in enumerate(new, 1):
            if token in self.eos_ids:
                return i, "eos"
            if self.stop and self._completes(emitted, new[:i]):
                return i, "stop"
            if len(emitted) + i >= limit:
                return i, "length"
        return len(new), None

    def _completes(self, emitted: list[int], new: list[int]) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode((emitted + new)[-self._window :])
        return any(s in text for s in self.stop)
