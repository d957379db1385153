"""PEFT's LoRA layers in fewer steps, for the length of a rollout: nothing is merged, so nothing has to be undone.

    y = W x + (s B) (A x)

as PEFT computes it in evaluation, but with the scale s in B, and with one product A x for layers that share their
input. Anything but plain LoRA (several adapters at once, DoRA, biases) keeps PEFT's own forward.

The prepared matrices stay where they are from rollout to rollout and only take new values, because a recorded pass
reads them there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specroll.model.joint import Joint, together
from specroll.model.packing import Multiplied


def plain_lora(module: nn.Module) -> Any | None:
    """The module, if it is a LoRA layer around a linear one with one active, unmerged adapter of the plain kind."""
    lora = sys.modules.get("peft.tuners.lora.layer")  # a model with adapters has imported it
    if lora is None or type(module) is not lora.Linear:
        return None
    layer: Any = module
    if layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant or layer.lora_B[active[0]].bias is not None:
        return None
    return layer


@contextmanager
def lora_in_use(model: nn.Module) -> Iterator[list[Tensor]]:
    """For the length of the block, plain LoRA layers run in fewer steps. Wants evaluation mode: dropout is left out.

    Yields the matrices that they read instead of the adapters' own.
    """
    swapped: list[nn.Module] = []
    prepared: list[Tensor] = []
    try:
        for group in together(model, plain_lora):
            for layer, down in zip(group, _down(group, prepared), strict=True):
                name = _adapter(layer)
                up_RO = _kept(layer, "up", (layer.lora_B[name].weight * layer.scaling[name]).T)
                prepared.append(up_RO)
                layer.forward = Adapted(layer.base_layer, down, up_RO)  # type: ignore[method-assign]
                swapped.append(layer)
        yield prepared
    finally:
        for layer in swapped:
            del layer.forward


def own_state(model: nn.Module) -> list[tuple[Any, ...]]:
    """What decides, besides weights, what PEFT's own forward does: a recorded pass would not notice a change."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_active_adapter")]
    return [
        (
            layer.disable_adapters,
            list(layer.active_adapters),
            list(getattr(layer, "merged_adapters", ())),
            dict(getattr(layer, "scaling", {})),
        )
        for layer in layers
    ]


def _kept(layer: nn.Module, which: str, fresh: Tensor) -> Tensor:
    """The values of `fresh`, where the layer's last ones of this kind were if they fit there."""
    kept = _PREPARED.setdefault(layer, {})
    last = kept.get(which)
    if last is None or (last.shape, last.dtype, last.device) != (fresh.shape, fresh.dtype, fresh.device):
        kept[which] = fresh
    else:
        last.copy_(fresh)
    return kept[which]


def _adapter(layer: Any) -> str:
    return next(name for name in layer.active_adapters if name in layer.lora_A)


class Down:
    """The product with an adapter's A."""

    def __init__(self, weight_RI: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        self.out_features, self.in_features = weight_RI.shape
        self.forward = forward


class Adapted:
    """What a LoRA layer runs instead of PEFT's forward."""

    def __init__(self, base: nn.Module, down: Down, up_RO: Tensor) -> None:
        self.base, self.down, self.up_RO = base, down, up_RO

    def __call__(self, x: Tensor) -> Tensor:
        out, low = self.base(x), self.down.forward(x)
        sum_NO = torch.addmm(out.flatten(0, -2).to(low.dtype), low.flatten(0, -2), self.up_RO)
        return sum_NO.view(out.shape).to(out.dtype)


def _down(group: tuple[Any, ...], prepared: list[Tensor]) -> list[Down]:
    """For each layer the product with its A; adds to `prepared`."""
    weights = [layer.lora_A[_adapter(layer)].weight for layer in group]
    if len({(weight.dtype, weight.shape[1]) for weight in weights}) > 1:
        return [Down(weight, Multiplied(weight)) for weight in weights]
    together_RI = _kept(group[0], "down", torch.cat(weights))
    prepared.append(together_RI)
    joint = Joint(Multiplied(together_RI), [weight.shape[0] for weight in weights])
    return [Down(weight, part) for weight, part in zip(weights, joint.parts, strict=True)]


_PREPARED: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
