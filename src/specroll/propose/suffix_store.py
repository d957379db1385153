"""Earlier responses by prompt: kept across epochs in bounded memory, the oldest dropped, saved and restored.

A prompt is known by its digest, so what is kept and written holds no prompt. Knows nothing of how responses are used.

    R  responses, oldest first    T  tokens of all of them, end to end
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_OF_ONE = 32
"""Responses to one prompt that are kept at most."""
_DIGEST_BYTES = 16


class Response(NamedTuple):
    prompt: bytes
    token_T: np.ndarray  # int32


class ResponseStore:
    """The latest responses to each prompt, `max_tokens` in all at most."""

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        if max_tokens < 1:
            raise ValueError(f"a store of responses needs room for at least one token, got max_tokens={max_tokens}")
        self.max_tokens = max_tokens
        self.tokens = 0
        """Held at present."""
        self._responses: dict[int, Response] = {}  # by a running number, so oldest first
        self._of: dict[bytes, deque[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Keep a response, and drop the oldest that there is no more room for. One longer than all room is not kept."""
        self._add(Response(_digest(prompt_ids), np.array(token_ids, dtype=np.int32)))

    def of(self, prompt_ids: Sequence[int]) -> list[list[int]]:
        """The responses to a prompt, oldest first."""
        return [self._responses[number].token_T.tolist() for number in self._of.get(_digest(prompt_ids), ())]

    def _add(self, response: Response) -> None:
        if not 0 < response.token_T.size <= self.max_tokens:
            return
        own = self._of.setdefault(response.prompt, deque())
        own.append(self._next)
        self._responses[self._next] = response
        self._next += 1
        self.tokens += response.token_T.size
        if len(own) > MOST_OF_ONE:
            self._drop(own[0])
        while self.tokens > self.max_tokens:
            self._drop(next(iter(self._responses)))

    def _drop(self, number: int) -> None:
        """Forget a response, the oldest of its prompt."""
        prompt, token_T = self._responses.pop(number)
        self.tokens -= token_T.size
        self._of[prompt].popleft()
        if not self._of[prompt]:
            del self._of[prompt]

    def state_dict(self) -> dict[str, Tensor]:
        responses = self._responses.values()
        prompt_RB = np.frombuffer(b"".join(r.prompt for r in responses), dtype=np.uint8).reshape(-1, _DIGEST_BYTES)
        return {
            "prompt_RB": torch.from_numpy(prompt_RB.copy()),
            "length_R": torch.tensor([r.token_T.size for r in responses], dtype=torch.int64),
            "token_T": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *(r.token_T for r in responses)])),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what is held; of more than there is room for, the oldest are dropped.

        Raises ValueError for what is no such state.
        """
        kinds = {"prompt_RB": torch.uint8, "length_R": torch.int64, "token_T": torch.int32}
        if any(name not in state or state[name].dtype != kind for name, kind in kinds.items()):
            raise ValueError(f"responses are tensors {', '.join(kinds)}")
        prompt_RB, length_R, token_T = (state[name] for name in kinds)
        if (
            tuple(prompt_RB.shape) != (length_R.numel(), _DIGEST_BYTES)
            or length_R.dim() != 1
            or token_T.dim() != 1
            or bool((length_R < 1).any())
            or int(length_R.sum()) != token_T.numel()
            or bool((token_T < 0).any())
        ):
            raise ValueError("the responses' prompts, lengths and tokens do not fit one another")
        self.__init__(self.max_tokens)
        pieces = np.split(token_T.numpy(), length_R.cumsum(0).tolist()[:-1])
        for prompt_B, token_T in zip(prompt_RB.numpy(), pieces, strict=False):
            self._add(Response(prompt_B.tobytes(), token_T.copy()))


def _digest(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(prompt_ids, dtype=np.int64).tobytes(), digest_size=_DIGEST_BYTES).digest()
