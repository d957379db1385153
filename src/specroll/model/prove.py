"""The proof asked of a model that the tests do not cover: our passes against the model's own forward, on itself.

A prompt pass and a tree pass (a chain with a wrong sibling before each token, so that a leak between branches shows)
must give the logits of one ordinary forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specroll.types import Tree

if TYPE_CHECKING:
    from specroll.model.target import HFTarget


class UnsupportedModelError(ValueError):
    """The model cannot be run exactly; the message says why and what to do."""


_TREE = 4  # tokens of the chain, root included
_LONGEST_WINDOW = 1024
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference of logits, as a share of their largest magnitude."""


def worst_difference(target: HFTarget, tokens: Tensor) -> float:
    """Largest |logit difference| over the chain's rows, as a share of the largest logit. `tokens` [T], T > 4."""
    prefix = tokens.shape[0] - _TREE
    with torch.inference_mode():
        target.model.eval()
        reference = target.model(input_ids=tokens[None], use_cache=False).logits[0, prefix - 1 :].float()
    with target.rolling_out():
        held, target.cache = target.cache, None
        cache = target.reserve(1, tokens.shape[0] + _TREE)
        out, (kv,) = target.prefill([tokens[:prefix].tolist()])
        cache.fill(0, kv)
        tree = decoy_chain(tokens[prefix:], target.vocab_size)
        length = torch.tensor([prefix], device=target.device)
        rows = target.forward_tree(tree, length, prefix).logits_NV
        chain = torch.cat((out.logits_NV, rows[:1], rows[2::2])).float()
        target.cache = held
    return ((chain - reference).abs().max() / reference.abs().max()).item()


def decoy_chain(token_T: Tensor, vocab_size: int) -> Tree:
    """A chain in which every token but the root has a wrong sibling packed before it."""
    device = token_T.device
    tokens, parents, depths = [int(token_T[0])], [0], [0]
    last = 0
    for depth, token in enumerate(token_T[1:].tolist(), 1):
        tokens += [(token + 1) % vocab_size, token]
        parents += [last, last]
        depths += [depth, depth]
        last = len(tokens) - 1
    size = len(tokens)
    slot = torch.arange(size, device=device)
    zero = torch.zeros_like(slot)
    as_tensor = [torch.tensor(x, device=device) for x in (tokens, parents, depths)]
    return Tree(*as_tensor, sequence_N=zero, slot_N=slot, rank_N=zero, size=size, max_depth=len(token_T) - 1)


def prove(target: HFTarget) -> None:
    """Raise `UnsupportedModelError` unless the model's own forward agrees with ours."""
    kind = target.config.model_type
    window = getattr(target.config, "sliding_window", None) or 0
    if window > _LONGEST_WINDOW:
        window = 0  # a wider one cannot be crossed in a quick proof; its mask is the same code as a narrow one's
    length = min(window + 12, target.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (length,), generator=generator).to(target.device)
    training = [m for m in target.model.modules() if m.training]
    try:
        worst = worst_difference(target, tokens)
    except (NotImplementedError, TypeError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(f"a model of type {kind!r} cannot be run with packed tokens: {error}") from error
    finally:
        for module in training:
            module.training = True
    allowed = TOLERANCE.get(target.causal.dtype, 1e-4)
    if not worst <= allowed:
        raise UnsupportedModelError(
            f"a model of type {kind!r} gives other logits when run with packed tokens (off by {worst:.1e} of the "
            f"largest, allowed {allowed:.0e}), so its rollouts would not be exact. Use transformers' own generate."
        )
