"""The policy as the engine sees it: any installed transformers causal LM, its modelling code untouched.

Knows how to call the model with packed tokens and how to leave it as it was found; refuses by name what it cannot run
exactly. Knows nothing of proposers, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from specroll.device import recorder
from specroll.model.adapter import lora_in_use, own_state
from specroll.model.attention import NAME, PaddedTreePass, Pass, PromptPass, TreePass
from specroll.model.cache import CacheShape, SlotCache
from specroll.model.fused import FusedLayers
from specroll.model.graphs import RecordedPasses
from specroll.model.linear import PackedLinears
from specroll.model.prove import UnsupportedModelError, prove
from specroll.tree.grow import roots
from specroll.tree.mask import ancestors
from specroll.types import TargetOutput, Tree

PROVED = frozenset({"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text"})
"""Model types that the tests prove exact. Others are proved at construction, on the model itself."""

_INSTEAD = "Use transformers' own generate for it, or a model of one of these types: " + ", ".join(sorted(PROVED)) + "."


def unwrap(model: nn.Module) -> nn.Module:
    """The causal LM inside a PEFT wrapper (its adapters stay in place); any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _refuse(model: nn.Module, config: Any) -> None:
    """Raise `UnsupportedModelError` for what is known to be impossible, before any weight is touched."""
    name = type(model).__name__
    reasons = {
        "it is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
        "it keeps a recurrent state": getattr(model, "_is_stateful", False),
        "its attention cannot be replaced (no attention interface)": not getattr(
            model, "_supports_attention_backend", False
        ),
        "it has no language-model head": getattr(model, "get_output_embeddings", lambda: None)() is None,
        "its attention scores are soft-capped": getattr(config, "attn_logit_softcapping", None) is not None,
        "its prompt-learning adapter adds virtual tokens": any(
            getattr(c, "is_prompt_learning", False) for c in getattr(model, "peft_config", {}).values()
        ),
    }
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    reasons[f"it has layers of kind {', '.join(sorted(kinds))}"] = bool(kinds)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = {r.get("rope_type") for r in [rope, *(v for v in rope.values() if isinstance(v, dict))]}
    reasons["its rotary embedding changes with the longest sequence of a batch"] = bool(ropes & {"dynamic", "longrope"})
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{name} cannot be run exactly: {reason}. {_INSTEAD}")


class HFTarget:
    """Runs packed prompts and packed trees through the model, with keys and values in slots."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: a transformers causal LM, or a PEFT model around one. Raises `UnsupportedModelError`."""
        self.model = model
        self.causal: Any = unwrap(model)
        self.config = self.causal.config.get_text_config()
        _refuse(self.causal, self.config)
        self.lm_head: nn.Module = self.causal.get_output_embeddings()
        self.vocab_size: int = self.lm_head.weight.shape[0]  # type: ignore[union-attr, index]
        self.hidden_size: int = self.config.hidden_size
        self._packed = PackedLinears.of(self.causal)
        self._fused = FusedLayers.of(self.causal)
        self.cache: SlotCache | None = None
        self.recorded: RecordedPasses | None = None  # tree passes as graphs, where the device has them
        if self.config.model_type not in PROVED:
            prove(self)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device  # type: ignore[union-attr, return-value]

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape.of(self.config, self.causal.dtype, self.device)

    @property
    def cost_signature(self) -> str:
        """What tells two policies of one architecture apart in cost: packed layers, and layers in all (adapters)."""
        layers = sum(1 for m in self.model.modules() if isinstance(m, nn.Linear))
        packed = f"{self._packed.count} of {layers} linear layers in {self._packed.products} packed products"
        return f"{packed}, {self._fused.count} layers fused"

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """Evaluation mode, no gradients, our attention: for the length of a rollout, then everything as it was."""
        training = [m for m in self.model.modules() if m.training]
        attention = self.config._attn_implementation
        try:
            self.model.eval()
            self.config._attn_implementation = NAME
            with (
                torch.inference_mode(),
                self._packed.in_use(),
                lora_in_use(self.causal) as prepared,
                self._fused.in_use() as unmade,
            ):
                self._prepare_recorded(prepared)
                if unmade:
                    self._first_passes()
                yield
        finally:
            self.config._attn_implementation = attention
            for module in training:
                module.training = True

    def _first_passes(self) -> None:
        """A pass of each kind, which makes programs: what one costs is not to be asked before."""
        self.prefill([(0,)])
        cache = SlotCache(self.cache_shape, 1, 2)
        length_S, tree = torch.tensor([1]), roots(torch.tensor([0]))
        self._forward(tree.token_N, length_S, TreePass(cache, tree, length_S, 1, ancestors(tree)), 0)

    def _prepare_recorded(self, prepared: list[Tensor]) -> None:
        """For a rollout that reads the weights and what was `prepared` of them where they are now."""
        if self.recorded is None or self.recorded.device != self.device:
            way = recorder(self.device)
            self.recorded = None if way is None else RecordedPasses(way, self.device, type(self.causal).__name__)
        if self.recorded is not None:
            read = (*self.causal.parameters(), *self.causal.buffers(), *prepared)
            self.recorded.keep_while("weights", ([t.data_ptr() for t in read], own_state(self.causal)))

    def reserve(self, slots: int, length: int) -> SlotCache:
        """Slots for so many sequences of so many tokens; kept between rollouts while they are large enough."""
        if self.cache is None or not self.cache.holds(slots, length):
            self.cache = None  # free the old one first
            self.cache = SlotCache(self.cache_shape, slots, length)
            if self.recorded is not None:
                self.recorded.keep_while("slots", self.cache.place)
        return self.cache

    def release(self) -> None:
        """Give the slots back, for instance while the optimizer needs the memory."""
        self.cache = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[TargetOutput, list[Tensor]]:
        """Run whole prompts in one packed pass.

        Returns the output at each prompt's last token (one row per prompt), and each prompt's keys and values
        [layer, 2, head, P, width].
        """
        lengths = [len(p) for p in prompts]
        shape = self.cache_shape
        kv = torch.empty(
            (shape.layers, 2, shape.heads, sum(lengths), shape.head_width), dtype=shape.dtype, device=shape.device
        )
        tokens = torch.tensor([t for p in prompts for t in p], device=self.device)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        last = torch.tensor([end - 1 for end in accumulate(lengths)], device=self.device)
        out = self._forward(tokens, positions, PromptPass(lengths, kv), last)
        return out, list(kv.split(lengths, 3))

    @contextmanager
    def every_state(self) -> Iterator[list[Tensor]]:
        """For the length of the block, collects the last hidden states [N, H] of all rows of each pass.

        `prefill` itself returns the last row of each prompt alone, as lm_head sees no other.
        """
        seen: list[Tensor] = []
        hook = self.causal.get_decoder().register_forward_hook(lambda _, inputs, output: seen.append(output[0][0]))
        try:
            yield seen
        finally:
            hook.remove()

    def forward_tree(self, tree: Tree, length_S: Tensor, longest: int) -> TargetOutput:
        """One pass over all trees, behind prefixes of `length_S` tokens in the first S slots of the reserved cache.

        `longest` is the largest of `length_S`. The output may be overwritten by the next tree pass.
        """
        assert self.cache is not None
        if self.recorded is not None:
            out = self.recorded.run(self._padded, self.cache, tree, length_S, longest)
            if out is not None:
                return out
        rows = TreePass(self.cache, tree, length_S, longest, ancestors(tree))
        return self._forward(tree.token_N, length_S[tree.sequence_N] + tree.depth_N, rows, 0)

    def _padded(self, cache: SlotCache, tree: Tree, length_X: Tensor, live: int) -> TargetOutput:
        """A tree pass that can be recorded: see `PaddedTreePass`."""
        rows = PaddedTreePass(cache, tree, length_X, live, ancestors(tree))
        return self._forward(tree.token_N, length_X[tree.sequence_N] + tree.depth_N, rows, 0)

    def _forward(self, token_N: Tensor, position_N: Tensor, rows: Pass, keep: Tensor | int) -> TargetOutput:
        seen: list[Tensor] = []
        hook = self.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            out = self.model(
                input_ids=token_N[None],
                position_ids=position_N[None],
                attention_mask=None,
                use_cache=False,
                logits_to_keep=keep,
                specroll_pass=rows,
            )
        finally:
            hook.remove()
        return TargetOutput(logits_NV=out.logits[0], hidden_NH=seen[0][0])
