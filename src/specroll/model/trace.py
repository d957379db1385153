"""A decoder layer's forward as a graph, cut at products and attention, with what lies between compiled.

Knows PyTorch's tracer and compiler, not rollouts. Rows are dimension 1 of every input; there may be any number of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

_ROWS = 64  # that the compiler plans for

_OPS = torch.library.Library("specroll", "FRAGMENT")
_OPS.define("linear(Tensor x, int index, int features, int stride, ScalarType dtype) -> Tensor")
_OPS.define("attend(Tensor query, Tensor key, Tensor value, float scale, int? window) -> Tensor")


@torch.library.register_fake("specroll::linear")
def _(x: Tensor, index: int, features: int, stride: int, dtype: torch.dtype) -> Tensor:
    rows = x.shape[1]
    return x.new_empty_strided((1, rows, features), (rows * stride, stride, 1), dtype=dtype)


@torch.library.register_fake("specroll::attend")
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


_LINEAR, _ATTEND = torch.ops.specroll.linear.default, torch.ops.specroll.attend.default


class _TracedPass:
    """The pass that a layer sees while it is traced."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        return torch.ops.specroll.attend(query, key, value, scale, window)


def traced(
    layer: nn.Module, own: Sequence[Place], linears: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.GraphModule:
    """The layer's forward over its tensor inputs, then the tensors in `own` places. `linears` and attention are called.

    A linear layer here is whatever has in_features, out_features and a forward of its own that can be replaced.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils._pytree import tree_flatten, tree_unflatten

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(tensor: Tensor, rows: bool) -> Tensor:
        shape = [_ROWS if rows and d == 1 else n for d, n in enumerate(tensor.shape)]
        kinds = [DimDynamic.DUCK if rows and d == 1 else DimDynamic.STATIC for d in range(len(shape))]
        layout = torch.empty(shape).stride() if rows else tensor.stride()
        example = torch.empty_strided(shape, layout, dtype=tensor.dtype)
        return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    given, spec = tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
    flat: list[Any] = [_TracedPass() if hasattr(value, "attend") else value for value in given]

    def forward(*tensors: Tensor) -> Tensor:
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=False):
            values[place] = tensor
        args, kwargs = tree_unflatten(values, spec)
        with _replaced(own, tensors[len(places) :]):
            return layer(*args, **kwargs)

    fakes = [fake(flat[place], True) for place in places] + [fake(of[name], False) for of, name in own]
    calls = _calls(linears, flat[places[0]].dtype)
    forwards = [(vars(linear), "forward") for linear in linears]
    with _replaced(forwards, calls), mode, enable_python_dispatcher():
        return make_fx(forward, decomposition_table=select_decomp_table())(*fakes)


Place = tuple[dict[str, Any], str]
"""Where something is kept: an object's names, and one of them."""


@contextmanager
def _replaced(places: Sequence[Place], values: Sequence[Any]) -> Iterator[None]:
    """For the length of the block there are other values in these places, or values where there are none."""
    before = [(of, name, of.get(name), name in of) for of, name in places]
    try:
        for (of, name), value in zip(places, values, strict=True):
            of[name] = value
        yield
    finally:
        for of, name, value, there in before:
            if there:
                of[name] = value
            else:
                del of[name]


def _calls(linears: Sequence[Any], dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
    """For each linear layer what leaves a call in the graph, with the layout that the layer really gives."""
    calls = []
    for index, linear in enumerate(linears):
        out = linear.forward(torch.zeros(1, 2, linear.in_features, dtype=dtype))
        known = {"index": index, "features": linear.out_features, "stride": out.stride(1), "dtype": out.dtype}
        calls.append(partial(torch.ops.specroll.linear, **known))
    return calls


def compiled(graph: fx.GraphModule) -> tuple[Callable[..., Tensor], list[Callable[..., Any]]]:
    """What is between the calls, compiled; and the graph as a function of all.

    It takes the graph's inputs, the compiled pieces, the linear layers' forwards and attention, in this order.
    """
    from torch.fx.passes.split_module import split_module

    parts = split_module(graph, None, _stages(graph).__getitem__)  # type: ignore[arg-type]
    top = parts.graph
    used: dict[fx.Node, Any] = {n: parts.get_submodule(n.target) for n in top.nodes if n.op == "call_module"}
    single = {node for node, part in used.items() if _gives_list(part)}
    pieces = {node: _compile(part) for node, part in used.items() if not all(map(_is_free, part.graph.nodes))}
    linears = sum(node.target == _LINEAR for node in graph.graph.nodes)
    with top.inserting_before(next(iter(used))):
        of_pieces = {node: top.placeholder(f"piece_{i}") for i, node in enumerate(pieces)}
        of_linears = [top.placeholder(f"linear_{i}") for i in range(linears)]
        attend = top.placeholder("attend_rows")
    for node, part in used.items():
        with top.inserting_before(node):
            if node in pieces:
                given = top.call_function(apply, (of_pieces[node], list(node.args)))
            else:
                given = _inlined(part, node, of_linears, attend)
            if node in single:
                given = top.call_function(operator.getitem, (given, 0))
        node.replace_all_uses_with(given)
        top.erase_node(node)
    return fx.GraphModule({}, top).forward, list(pieces.values())


def _gives_list(part: fx.GraphModule) -> bool:
    """Let a part give a list whatever it gives, as the compiler wants. Returns whether it gave a single tensor."""
    output = next(n for n in part.graph.nodes if n.op == "output")
    single = isinstance(output.args[0], fx.Node)
    if single:
        output.args = (output.args,)
        part.recompile()
    return single


def _is_call(node: fx.Node) -> bool:
    return node.target in (_LINEAR, _ATTEND)


def _is_free(node: fx.Node) -> bool:
    """Whether nothing is to be computed for it: not worth a compiled piece."""
    return node.op != "call_function" or _is_call(node) or getattr(node.target, "is_view", False)


def _inlined(part: fx.GraphModule, node: fx.Node, linears: list[fx.Node], attend: fx.Node) -> fx.Node:
    """A part as it is, calls one after the other as in the layer: what siblings share is multiplied once."""
    top = node.graph
    known = dict(zip((n for n in part.graph.nodes if n.op == "placeholder"), node.args, strict=True))
    for inner in part.graph.nodes:
        if inner.target == _LINEAR:
            known[inner] = top.call_function(apply, (linears[inner.args[1]], known[inner.args[0]]))
        elif inner.target == _ATTEND:
            known[inner] = top.call_function(apply, (attend, *(known.get(arg, arg) for arg in inner.args)))
        elif inner.op == "call_function":
            known[inner] = top.node_copy(inner, known.__getitem__)  # type: ignore[arg-type]
    output = next(n for n in part.graph.nodes if n.op == "output")
    return top.call_function(together, tuple(known[n] for n in output.args[0]))  # type: ignore[index, union-attr]


def apply(function: Callable[..., Any], *args: Any) -> Any:
    """What the graph calls its parts by."""
    return function(*args)


def together(*results: Any) -> tuple[Any, ...]:
    """What the graph gathers a part's results by."""
    return results


def _stages(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """In which part of the graph each node is, odd ones for calls: these as early as can be, all else as late."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    stage: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((stage.get(arg, 0) for arg in node.all_input_nodes), default=0)
        stage[node] = before + (before % 2 != _is_call(node))
    last = max(stage.values()) // 2 * 2
    for node in reversed(nodes):
        if not _is_call(node):
            stage[node] = min((stage[user] // 2 * 2 for user in node.users if user in stage), default=last)
    return stage


def _compile(part: fx.GraphModule) -> Callable[..., Any]:
    """What is between two calls, compiled: it takes a list and gives one."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    inputs = [node.meta["val"] for node in part.graph.nodes if node.op == "placeholder"]
    with (
        tracing(TracingContext(detect_fake_mode(inputs))),
        config.patch({"compile_threads": 1, "cpp.dynamic_threads": True}),
    ):
        return compile_fx_inner(part, inputs)  # type: ignore[return-value]
