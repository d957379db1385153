"""Proposers by name: the built-in ones, anybody's own class by its import path, and several as one.

What is imported is what a user names on the command line or in a call, never what a file says that is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from specroll.config import is_import_path
from specroll.guard import completed
from specroll.propose.blend import Blend, FollowingBlend
from specroll.propose.suffix import SuffixProposer
from specroll.types import Follower, Proposer

Maker = Callable[[PreTrainedModel, Any], Proposer]
"""Called with the model (without adapters around it) and its tokenizer, which may be None."""

# `heads` is not here: whoever has heads, or lets them learn, makes its proposer without this.
_BUILT_IN: Mapping[str, Maker] = {
    "suffix": lambda model, tokenizer: SuffixProposer(),
}


def find(name: str) -> Maker:
    """The maker of a proposer that is built in (but heads) or named as `module:Class`.

    Raises ValueError for one that is not there, naming what is missing.
    """
    if is_import_path(name):
        return _own(name)
    if name not in _BUILT_IN:
        raise ValueError(
            f"no proposer is named {name!r}: {', '.join(_BUILT_IN)} are, or your own class as module:Class"
        )
    return _BUILT_IN[name]


def together(proposers: Sequence[Proposer], vocab_size: int) -> Proposer | None:
    """Several proposers as one; None of none."""
    if len(proposers) > 1:
        kind = FollowingBlend if any(isinstance(proposer, Follower) for proposer in proposers) else Blend
        return kind(proposers, vocab_size=vocab_size)
    return proposers[0] if proposers else None


def _own(path: str) -> Maker:
    module_name, class_name = path.split(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself wants
        raise ValueError(
            f"there is no module {error.name!r} for the proposer {path}: run from the folder that it is in, or put "
            "that folder on PYTHONPATH"
        ) from error
    kind = getattr(module, class_name, None)
    if not callable(kind):
        raise ValueError(f"the proposer {path} is not there: {module.__file__} has no class {class_name}")

    def make(model: PreTrainedModel, tokenizer: Any) -> Proposer:
        try:
            made = kind(model, tokenizer)
        except TypeError as error:
            raise ValueError(f"{path} could not be made as {class_name}(model, tokenizer): {error}") from error
        return completed(made)

    return make
