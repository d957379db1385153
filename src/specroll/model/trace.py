"""A decoder layer's forward as a graph, cut at calls that no tracer sees through, and what lies between compiled.

Knows PyTorch's tracer and compiler, not rollouts. Rows are dimension 1 of every input; there may be any number of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from specroll.model.attention import SLOT_READS, attend_slots

ROWS = 40  # that the compiler plans for

_OPS = torch.library.Library("specroll", "FRAGMENT")
_OPS.define("linear(Tensor x, int index, int features, int stride, ScalarType dtype) -> Tensor")
_OPS.define("attend(Tensor query, Tensor key, Tensor value, float scale, int? window) -> Tensor")
_OPS.define("packed(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("specroll::linear")
def _(x: Tensor, index: int, features: int, stride: int, dtype: torch.dtype) -> Tensor:
    rows = x.shape[1]
    return x.new_empty_strided((1, rows, features), (rows * stride, stride, 1), dtype=dtype)


@torch.library.register_fake("specroll::attend")
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


@torch.library.register_fake("specroll::packed")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LINEAR, _ATTEND = torch.ops.specroll.linear.default, torch.ops.specroll.attend.default


class _TracedPass:
    """The pass that a layer sees while it is traced: over slots by what it `reads`, else a call."""

    def __init__(self, reads: Sequence[Tensor]) -> None:
        self._reads = reads

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if self._reads:
            return attend_slots(query, key, value, scale, *self._reads)
        return torch.ops.specroll.attend(query, key, value, scale, window)


def traced(
    layer: nn.Module,
    own: Sequence[Place],
    linears: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reads: Sequence[Tensor],
) -> fx.GraphModule:
    """The layer's forward over its tensor inputs, then the tensors in `own` places, then what its pass `reads`.

    `linears` are called, and so is attention if its pass reads nothing. A linear layer here is whatever has
    in_features, out_features and a forward of its own that can be replaced. `reads` are those of a pass of `ROWS` rows.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils._pytree import tree_flatten, tree_unflatten

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(like: Tensor, shape: Sequence[int], layout: Sequence[int], free: dict[int, DimDynamic]) -> Tensor:
        example = torch.empty_strided(shape, layout, dtype=like.dtype)
        kinds = [free.get(d, DimDynamic.STATIC) for d in range(len(shape))]
        return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    def of_rows(tensor: Tensor) -> Tensor:
        shape = [ROWS if d == 1 else n for d, n in enumerate(tensor.shape)]
        return fake(tensor, shape, torch.empty(shape).stride(), {1: DimDynamic.DUCK})

    def itself(tensor: Tensor) -> Tensor:
        layout = tensor.stride() if tensor.layout == torch.strided else torch.empty(tensor.shape).stride()
        return fake(tensor, tensor.shape, layout, {})

    def of_pass(tensor: Tensor, free: Sequence[int]) -> Tensor:
        return fake(tensor, tensor.shape, tensor.stride(), dict.fromkeys(free, DimDynamic.DYNAMIC))

    given, spec = tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
    known = len(places) + len(own)

    def forward(*tensors: Tensor) -> Tensor:
        values = [_TracedPass(tensors[known:]) if hasattr(value, "attend") else value for value in given]
        for place, tensor in zip(places, tensors, strict=False):
            values[place] = tensor
        args, kwargs = tree_unflatten(values, spec)
        with _replaced(own, tensors[len(places) : known]):
            return type(layer).forward(layer, *args, **kwargs)  # whatever stands in its place for now

    fakes = [of_rows(given[place]) for place in places] + [itself(of[name]) for of, name in own]
    fakes += [of_pass(tensor, free) for tensor, free in zip(reads, SLOT_READS, strict=False)]
    calls = _calls(linears, given[places[0]].dtype)
    forwards = [(vars(linear), "forward") for linear in linears]
    with _replaced(forwards, calls), mode, enable_python_dispatcher():
        return _packed(make_fx(forward, decomposition_table=select_decomp_table())(*fakes))


def _packed(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with our own operator for products by packed weights: the compiler's wants these as constants."""
    _lower_packed()
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default):
        node.target, node.args = torch.ops.specroll.packed.default, node.args[:3]
    graph.recompile()
    return graph


@cache
def _lower_packed() -> None:
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    @register_lowering(torch.ops.specroll.packed.default, type_promotion_kind=None)
    def _(x: Any, weight: Any, bias: Any) -> Any:
        return TensorBox.create(LinearUnary.create(x, weight, bias, "none", [], ""))


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
            parts = [user for user in node.users if user.target == operator.getitem]
            users = {user for of in (node, *parts) for user in of.users} - set(parts)
            stage[node] = min((stage[user] // 2 * 2 for user in users if user in stage), default=last)
            stage.update(dict.fromkeys(parts, stage[node]))  # results come as one
    return stage


def _compile(part: fx.GraphModule) -> Callable[..., Any]:
    """What is between two calls, compiled: it takes a list and gives one."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    inputs = [node.meta["val"] for node in part.graph.nodes if node.op == "placeholder"]
    with (
        tracing(TracingContext(detect_fake_mode(inputs))),
        # A packed weight has no strides to check.
        config.patch({"compile_threads": 1, "cpp.dynamic_threads": True, "size_asserts": False}),
    ):
        return compile_fx_inner(part, inputs)  # type: ignore[return-value]
