"""Decoder layers as compiled programs: the installed code, traced, with what stands between its products fused.

Beside its products a layer does some sixty small operations, and with few rows calling them takes longer than what they
compute. So for the length of a rollout layers run as programs: their own forward is traced once and compiled by
PyTorch's Inductor, for any number of rows, attention over slots included. It is cut only where it calls what no tracer
sees through: attention of prompts, some packs, unusual adapters, which stay what they are at the time. Layers that
differ in their weights alone share a program.

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

from specroll.model.layer import Parts
from specroll.model.prove import TOLERANCE
from specroll.model.trace import ROWS, compiled, traced

logger = logging.getLogger(__name__)

SMALLEST = 1 << 20
"""Weights of a layer that are worth the seconds which a compiler takes."""
_MOST_KINDS = 4  # of layers, each of which is compiled
_TRIED_ROWS, _TRIES = (1, 3, 40), 3


class Program(NamedTuple):
    """What a kind of layer does, given its inputs, its own tensors, what the pass reads, and what it calls."""

    run: Callable[..., Tensor]
    pieces: list[Callable[..., Any]]
    asked: tuple[Any, ...] | None
    """What it asks of a pass over slots to know what to read; None: it calls the pass for attention."""


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
        self._agreed: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()
        self._passes: dict[tuple[Any, int], list[Any]] = {}  # that programs are tried in
        self.count = 0
        """Layers that run as programs in this rollout, or did in the latest."""

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """For the length of the block layers run as programs. Linear layers have to be what they will be already.

        Yields whether programs are still to be made, which the first pass of each kind does.
        """
        parts = {layer: Parts.of(layer) for layer in self._layers()}
        kinds = {of.kind for of in parts.values()}
        if None in kinds or len(kinds) > _MOST_KINDS:
            parts = {}
        known = [any(of.kind == kind for kind, _ in self._agreed.get(layer, ())) for layer, of in parts.items()]
        self.count = sum(known)
        try:
            for layer, of in parts.items():
                layer.forward = _FusedLayer(layer, partial(self._runner, layer, of))
            yield not all(known)
        finally:
            self._passes.clear()
            for layer in parts:
                vars(layer).pop("forward", None)

    def _layers(self) -> Iterator[Any]:
        model: Any = self._model()
        failed = None in self._programs.values()
        if model is not None and not failed and _allowed(model):
            layers = [layer for layer in getattr(model.get_decoder(), "layers", ()) if "forward" not in vars(layer)]
            yield from (layers if all(_weights(layer) >= SMALLEST for layer in layers) else ())

    def _runner(self, layer: Any, of: Parts, inputs: Inputs, args: Any, kwargs: Any) -> Callable[..., Tensor] | None:
        """What runs the layer as a program for such inputs; None where it must run as it is."""
        key = of.kind, inputs.key
        trial = partial(self._trial, inputs), args, kwargs
        if key not in self._programs and None not in self._programs.values():
            self._programs[key] = _program(layer, of, *trial)
        program = self._programs.get(key)
        if program is None:
            return None
        run = _bound(layer, of, program)
        agreed = self._agreed.setdefault(layer, set())
        if key not in agreed:
            if not _agrees(layer, run, *trial):
                self._programs[key] = None
                return None
            self.count += not any(of.kind == kind for kind, _ in agreed)
            agreed.add(key)
        return run

    def _trial(self, inputs: Inputs, rows: int) -> list[Any]:
        """Two equal passes of so many made-up rows, of the kind that these inputs belong to."""
        key = inputs.key, rows
        if key not in self._passes:
            self._passes[key] = [inputs.rows.like(rows) for _ in range(2)]
        return self._passes[key]


_FUSED: WeakKeyDictionary[nn.Module, FusedLayers] = WeakKeyDictionary()


def _weights(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


_PLAIN = (type(None), bool, int, float, str)  # settings that are equal where they do the same


class Inputs(NamedTuple):
    """What a layer was called with, sorted."""

    tensors: list[Tensor]
    rows: Any
    """The pass; None where this is no call that a program could be made for."""
    key: tuple[Any, ...]
    """All else that a program depends on: one is used only for what it was made for."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        tensors: list[Tensor] = []
        settings: list[Any] = list(kwargs)
        rows, known = None, True
        for value in _flat((*args, *kwargs.values())):
            if isinstance(value, _PLAIN):
                settings.append(value)
            elif isinstance(value, Tensor):
                tensors.append(value)
                settings += (value.dtype, value.is_contiguous())
            elif hasattr(value, "attend"):
                rows = value
                settings.append(hasattr(value, "reads"))
            else:
                known = False
        return cls(tensors, rows if known else None, tuple(settings) if known else ())


class _FusedLayer:
    """A layer's forward for the length of a rollout."""

    def __init__(self, layer: Any, runner: Callable[..., Callable[..., Tensor] | None]) -> None:
        self._own, self._runner = layer.forward, runner
        self._runs: dict[tuple[Any, ...], Callable[..., Tensor] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs.of(args, kwargs)
        if inputs.rows is None:
            return self._own(*args, **kwargs)
        if inputs.key not in self._runs:
            self._runs[inputs.key] = None  # whatever is tried of the layer meanwhile runs as it is
            self._runs[inputs.key] = self._runner(inputs, args, kwargs)
        run = self._runs[inputs.key]
        return self._own(*args, **kwargs) if run is None else run(inputs.tensors, inputs.rows)


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


Trial = Callable[[int], list[Any]]


def _program(layer: Any, of: Parts, trial: Trial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program | None:
    """The program of layers of this kind, or None, with a warning, where it cannot be had."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    _, rows = trial(ROWS)
    asking = _Asking(rows)
    args, kwargs = _made_up(args, kwargs, ROWS, asking)
    type(layer).forward(layer, *args, **kwargs)
    asked = asking.asked if hasattr(rows, "reads") else None
    reads = rows.reads(_index(layer), *asked) if asked else ()
    try:
        with torch.inference_mode(False), torch.no_grad():
            graph = traced(layer, of.own, of.opaque, args, kwargs, reads)
            return Program(*compiled(graph), asked)
    except (BackendCompilerFailed, CppCompileError, InvalidCxxCompiler) as error:
        logger.warning(
            "%s runs as it is, which is slower: it cannot be compiled (%s). A C++ compiler, such as g++, and "
            "Python's headers are needed; TORCHDYNAMO_DISABLE=1 leaves compiling out.",
            type(layer).__name__,
            str(error).strip().splitlines()[0],
        )
        return None


def _index(layer: nn.Module) -> int:
    return next(m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx"))  # type: ignore[return-value]


def _bound(layer: nn.Module, of: Parts, program: Program) -> Callable[[list[Tensor], Any], Tensor]:
    """`program` with this layer's tensors and linear layers as they are now."""
    run, pieces, asked = program
    own, index = of.tensors, _index(layer)
    called = (*pieces, *(linear.forward for linear in of.opaque))

    def forward(tensors: list[Tensor], rows: Any) -> Tensor:
        reads = rows.reads(index, *asked) if asked else ()
        return run(*tensors, *own, *reads, *called, partial(rows.attend, index))

    return forward


class _Asking:
    """A pass that remembers what it was asked for."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.asked: tuple[Any, ...] = ()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.asked = window, key.shape[0], query.shape[0] // key.shape[0], query.dtype
        return self._rows.attend(layer, query, key, value, scale, window)


def _made_up(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, instead: Any, seed: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Inputs like these, of so many rows in the pass `instead`."""
    generator = torch.Generator().manual_seed(seed)

    def like(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(like(part) for part in value)
        if isinstance(value, Tensor):
            shape = (value.shape[0], rows, *value.shape[2:])
            if not value.dtype.is_floating_point:
                return torch.zeros(shape, dtype=value.dtype)
            return torch.randn(shape, generator=generator).to(value.dtype)
        return instead if hasattr(value, "attend") else value

    return tuple(like(a) for a in args), {k: like(v) for k, v in kwargs.items()}


def _agrees(layer: Any, run: Callable[..., Any], trial: Trial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the program does what the layer's own forward does, to rounding, on made-up input: in slots as well."""
    for rows in _TRIED_ROWS:
        mine, theirs = trial(rows)
        off = []
        # What is wrong is wrong every time. Rounding alone makes much where large numbers cancel, now and then.
        while len(off) < _TRIES and not (off and off[-1] <= TOLERANCE[args[0].dtype]):
            off.append(_off(layer, run, _made_up(args, kwargs, rows, theirs, seed=len(off)), mine, theirs))
        if not off[-1] <= TOLERANCE[args[0].dtype]:
            logger.warning(
                "%s runs as it is: what was compiled of it is off by %.1e of the largest value with %d rows",
                type(layer).__name__,
                min(off),
                rows,
            )
            return False
    return True


def _off(layer: Any, run: Callable[..., Any], made_up: tuple[Any, Any], mine: Any, theirs: Any) -> float:
    """The largest difference, of outputs or in slots, by the largest value there."""
    pairs = [(type(layer).forward(layer, *made_up[0], **made_up[1]), run(Inputs.of(*made_up).tensors, mine))]
    if hasattr(mine, "reads"):
        pairs += zip(theirs.cache.of_layer[_index(layer)], mine.cache.of_layer[_index(layer)], strict=True)
    return max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in pairs)
