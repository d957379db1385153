"""The small operations of decoder layers, fused: the installed code, traced and compiled between its products.

Beside its products a layer does some sixty small operations, and with few rows calling them takes longer than what they
compute. So for the length of a rollout layers run as programs: their own forward is traced once, cut where it calls a
linear layer or attention, and what lies between is compiled by PyTorch's Inductor, for any number of rows. Linear
layers stay what they are at the time, packed or with adapters, and so does attention. Layers that differ in their
weights alone share a program.

Every layer's program is tried against the layer's own forward first. Where something stands in the way (no C++
compiler, hooks, autocast, layers too small to be worth it) layers run as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from specroll.model.adapter import Adapted
from specroll.model.joint import Joint
from specroll.model.prove import TOLERANCE
from specroll.model.trace import Place, compiled, traced

logger = logging.getLogger(__name__)

SMALLEST = 1 << 20
"""Weights of a layer that are worth the seconds which a compiler takes."""
_MOST_KINDS = 4  # of layers, each of which is compiled
_TRIED_ROWS = (1, 3, 40)


class Program(NamedTuple):
    """What a kind of layer does, given its inputs, its own tensors, `pieces`, its linear layers and attention."""

    run: Callable[..., Tensor]
    pieces: list[Callable[..., Any]]


class FusedLayers:
    """The programs of one model's decoder layers."""

    @classmethod
    def of(cls, model: nn.Module) -> FusedLayers:
        """The programs of this causal LM, which all engines around it share."""
        if model not in _FUSED:
            _FUSED[model] = cls(model)
        return _FUSED[model]

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)  # weak, or a model that has programs could never be freed
        self._programs: dict[Any, Program | None] = {}
        self._agreed: WeakKeyDictionary[nn.Module, Program] = WeakKeyDictionary()
        self.count = 0
        """Layers that run as programs in this rollout, or did in the latest."""

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """For the length of the block layers run as programs. Linear layers have to be what they will be already.

        Yields whether programs are still to be made, which the first pass does.
        """
        layers = list(self._layers())
        kinds = [_kind(layer) for layer in layers]
        if None in kinds or len(set(kinds)) > _MOST_KINDS:
            layers = []
        self.count = sum(layer in self._agreed for layer in layers)
        try:
            for layer, kind in zip(layers, kinds, strict=False):
                layer.forward = partial(self._first, layer, kind)
            yield self.count < len(layers)
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)

    def _layers(self) -> Iterator[Any]:
        model: Any = self._model()
        failed = None in self._programs.values()
        if model is not None and not failed and _allowed(model):
            yield from (layer for layer in getattr(model.get_decoder(), "layers", ()) if "forward" not in vars(layer))

    def _first(self, layer: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """A layer's first pass of a rollout, in which it turns to its program if there is one for such inputs."""
        del layer.forward
        inputs = Inputs.of(args, kwargs)
        key = kind, str(inputs.settings)
        if key not in self._programs:
            self._programs[key] = _program(layer, args, kwargs)
        program = self._programs[key]
        if program is None:
            return layer.forward(*args, **kwargs)
        forward = _bound(layer, program, inputs.settings)
        if self._agreed.get(layer) is not program:
            if not _agrees(layer, forward, args, kwargs):
                self._programs[key] = None
                return layer.forward(*args, **kwargs)
            self.count += layer not in self._agreed
            self._agreed[layer] = program
        layer.forward = forward
        return forward(*args, **kwargs)


_FUSED: WeakKeyDictionary[nn.Module, FusedLayers] = WeakKeyDictionary()


class Inputs(NamedTuple):
    """What a layer was called with, sorted."""

    tensors: list[Tensor]
    settings: list[Any]
    """All else that a program depends on: one is used only where it is as it was when it was traced."""
    rows: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        tensors: list[Tensor] = []
        settings: list[Any] = list(kwargs)
        rows = None
        for value in _flat((*args, *kwargs.values())):
            if isinstance(value, Tensor):
                tensors.append(value)
                settings += [value.dtype, value.is_contiguous()]
            elif hasattr(value, "attend"):
                rows = value
            else:
                settings.append(value)
        return cls(tensors, settings, rows)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _allowed(model: nn.Module) -> bool:
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype in TOLERANCE
        and not torch.is_autocast_enabled("cpu")
        and os.environ.get("TORCHDYNAMO_DISABLE") != "1"  # PyTorch's own switch for whatever compiles
    )


def linears(layer: nn.Module) -> list[Any]:
    """The layer's linear layers, and those of plain adapters around them; other adapters as they are."""
    found: list[Any] = []
    for child in layer.children():
        forward = vars(child).get("forward")
        if isinstance(forward, Adapted):
            found += [forward.base, forward.down]
        elif type(child) is nn.Linear or hasattr(child, "base_layer"):
            found.append(child)
        else:
            found += linears(child)
    return found


def _inside(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose code a program contains: all of the layer but its linear layers and adapters."""
    hidden: set[int] = set()
    for name, module in layer.named_modules():
        if type(module) is nn.Linear or hasattr(module, "base_layer"):
            hidden.update(id(m) for m in module.modules())
        elif id(module) not in hidden:
            yield name, module


def own_places(layer: nn.Module) -> list[Place]:
    """Where the tensors are that a program reads itself: parameters, buffers, and what adapters add."""
    found: list[Place] = []
    for _, module in _inside(layer):
        kept = (module._parameters, module._buffers)
        found += [(of, name) for of in kept for name, tensor in of.items() if tensor is not None]
    adapted = (vars(module).get("forward") for module in layer.modules())
    return found + [(vars(forward), "up_RO") for forward in adapted if isinstance(forward, Adapted)]


def own_tensors(layer: nn.Module) -> list[Tensor]:
    return [of[name] for of, name in own_places(layer)]


def _kind(layer: nn.Module) -> Any | None:
    """All that a layer's forward depends on but the values of tensors; None where it must run as it is."""
    if sum(p.numel() for p in layer.parameters()) < SMALLEST:
        return None
    parts: list[Any] = [(type(m), m.in_features, m.out_features, _row_width(m)) for m in linears(layer)]
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return None
    for name, module in _inside(layer):
        if "forward" in vars(module):
            return None
        parts.append((name, type(module), *_settings(module)))
    parts += [(t.shape, t.stride(), t.dtype) for t in own_tensors(layer)]
    return tuple(parts)


def _row_width(linear: Any) -> int:
    """From one row of its output to the next: packs come and go with the values of weights, and siblings' are joint."""
    joint = getattr(getattr(linear.forward, "func", None), "__self__", None)
    return joint.width if isinstance(joint, Joint) else linear.out_features


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("layer_idx", "training"):
            yield name, value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _program(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program | None:
    """The program of layers of this kind, or None, with a warning, where it cannot be had."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        with torch.inference_mode(False), torch.no_grad():
            graph = traced(layer, own_places(layer), linears(layer), args, kwargs)
            return Program(*compiled(graph))
    except (BackendCompilerFailed, CppCompileError, InvalidCxxCompiler) as error:
        logger.warning(
            "%s runs as it is, which is slower: it cannot be compiled (%s). A C++ compiler, such as g++, and "
            "Python's headers are needed; TORCHDYNAMO_DISABLE=1 leaves compiling out.",
            type(layer).__name__,
            str(error).strip().splitlines()[0],
        )
        return None


def _bound(layer: Any, program: Program, settings: list[Any]) -> Callable[..., Tensor]:
    """The forward of this layer as `program`, with weights and linear layers as they are now."""
    own = layer.forward
    given = (*own_tensors(layer), *program.pieces, *(linear.forward for linear in linears(layer)))
    index = next(m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx"))
    run = program.run

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        inputs = Inputs.of(args, kwargs)
        if inputs.settings != settings or inputs.rows is None:
            return own(*args, **kwargs)
        return run(*inputs.tensors, *given, partial(inputs.rows.attend, index))

    return forward


class _Echo:
    """Attention on made-up input: something of queries, keys and values that is quickly had."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        group = query.shape[0] // key.shape[0]
        return (query * scale + (key + value).repeat_interleave(group, 0)).transpose(0, 1).contiguous()


def _agrees(layer: Any, program: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the program gives what the layer's own forward gives, to rounding, on made-up input."""
    own = layer.forward
    generator = torch.Generator().manual_seed(0)

    def made_up(value: Any, rows: int) -> Any:
        if isinstance(value, tuple):
            return tuple(made_up(part, rows) for part in value)
        if isinstance(value, Tensor):
            shape = (value.shape[0], rows, *value.shape[2:])
            if not value.dtype.is_floating_point:
                return torch.zeros(shape, dtype=value.dtype)
            return torch.randn(shape, generator=generator).to(value.dtype)
        return _Echo() if hasattr(value, "attend") else value

    for rows in _TRIED_ROWS:
        inputs = tuple(made_up(a, rows) for a in args), {k: made_up(v, rows) for k, v in kwargs.items()}
        expected, given = (f(*inputs[0], **inputs[1]).float() for f in (own, program))
        worst = (given - expected).abs().max() / expected.abs().max()
        if not worst <= TOLERANCE[args[0].dtype]:
            logger.warning(
                "%s runs as it is: what was compiled of it is off by %.1e of the largest value with %d rows",
                type(layer).__name__,
                worst,
                rows,
            )
            return False
    return True
