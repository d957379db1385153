"""Recorded passes: padded, bucketed and on static buffers, they give what the plain pass gives, and never stale.

`Eager` runs here what a CUDA graph would replay: the same function on the same buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from forbid import Forbid
from peft import LoraConfig, get_peft_model
from recorded import filled, recorded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from specroll.config import BudgetConfig, EngineConfig
from specroll.device import CaptureError, Eager
from specroll.engine import Engine
from specroll.model.attention import PaddedTreePass
from specroll.model.cache import SlotCache
from specroll.model.graphs import Bucket, _Recorded
from specroll.model.target import HFTarget
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.tree.grow import rank, roots
from specroll.types import Draft, Request, SamplingParams, Tree
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=3, top_p=0.95)
CPU = torch.device("cpu")


def some_trees(sequences: int, nodes: int, each: int, seed: int = 0, knows: tuple[float, float] = (0.9, 0.1)) -> Tree:
    """Trees of unequal size: the best nodes of sequences, the first and the last of which know so much."""
    generator = torch.Generator().manual_seed(seed)
    hit_SKC = torch.rand(sequences, 3, 4, generator=generator) * torch.linspace(*knows, sequences).view(-1, 1, 1)
    token_SKC = torch.rand(sequences, 3, VOCAB_SIZE, generator=generator).argsort(-1)[..., :4]
    root_S = torch.arange(sequences) + 5
    return rank(Draft(token_SKC, hit_SKC.log(), hit_SKC), root_S, most=nodes, each=each).plant(nodes)


ROUNDS: list[tuple[str, list[int], Callable[[], Tree], int]] = [
    ("roots", [12, 20, 3, 9, 1], lambda: roots(torch.tensor([5, 6, 7, 8, 9])), 8),
    ("no free slot", [12, 20, 3, 9, 1], lambda: roots(torch.tensor([5, 6, 7, 8, 9])), 5),
    ("trees", [12, 20, 3], lambda: some_trees(3, 11, 8), 4),
    ("trees, no free slot", [12, 20, 3], lambda: some_trees(3, 11, 8), 3),
    ("one sequence", [22], lambda: some_trees(1, 6, 6), 2),
    ("as many rows as cells", [4, 5], lambda: some_trees(2, 8, 4), 2),
]


@pytest.mark.parametrize(("kind", "lengths", "tree", "slots"), ROUNDS, ids=[r[0] for r in ROUNDS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_passes_give_the_plain_ones(
    architecture: str, kind: str, lengths: list[int], tree: Callable[[], Tree], slots: int
) -> None:
    model = tiny(architecture)
    plain, other = HFTarget(model), recorded(HFTarget(model))
    length_S = torch.tensor(lengths)
    outs = []
    for target in (plain, other):
        with target.rolling_out():
            filled(target, lengths, slots)
            outs.append(target.forward_tree(tree(), length_S, max(lengths)))
    torch.testing.assert_close(outs[1].logits_NV, outs[0].logits_NV, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outs[1].hidden_NH, outs[0].hidden_NH, rtol=1e-4, atol=1e-4)
    assert plain.cache is not None and other.cache is not None
    # What belongs to a running sequence is the same, and so is all that a finished one may still be moved from.
    written = plain.cache.kv[:, :, : len(lengths)], other.cache.kv[:, :, : len(lengths)]
    torch.testing.assert_close(*written, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_bucket_that_was_fuller_before_leaves_nothing_behind(architecture: str) -> None:
    """Many rounds through the same buffers, larger and smaller in turn."""
    target, plain = recorded(HFTarget(tiny(architecture))), HFTarget(tiny(architecture))
    sizes = [(3, 11), (3, 12), (3, 9), (4, 16), (3, 10), (3, 13), (3, 8), (1, 7), (1, 5)]
    for seed, (running, nodes) in enumerate(sizes):
        lengths = [12, 20, 3, 15][:running]
        knows = (0.9, 0.1) if seed % 2 else (0.1, 0.9)  # so rows of one round are other sequences' in the next
        tree, length_S = some_trees(running, nodes, 8, seed, knows), torch.tensor(lengths)
        outs = []
        for each in (plain, target):
            with each.rolling_out():
                filled(each, lengths, 4)
                outs.append(each.forward_tree(tree, length_S, max(lengths)))
        torch.testing.assert_close(outs[1].logits_NV, outs[0].logits_NV, rtol=1e-4, atol=1e-4)
    assert target.recorded is not None and target.recorded.recordings < len(sizes)


@pytest.mark.parametrize("bug", ["pads write to row 0", "pads lie in the rectangle", "longer prefix for pads"])
def test_planted_bugs_in_the_padding_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PaddedTreePass.__init__

    def broken(self, cache, tree, length_X, live, seen_Nn):  # type: ignore[no-untyped-def]
        original(self, cache, tree, length_X, live, seen_Nn)
        pad_N = tree.sequence_N == self.running
        if bug == "pads write to row 0":
            place_HN = self._write_X.view(-1, len(pad_N))
            self._write_X = place_HN.where(~pad_N, place_HN[:, :1]).flatten()
        if bug == "pads lie in the rectangle":
            self._row_SN[0, 0] = tree.token_N.shape[0] - 1
        if bug == "longer prefix for pads":
            self.length_S.add_(1)

    monkeypatch.setattr(PaddedTreePass, "__init__", broken)
    with pytest.raises(AssertionError):
        test_padded_passes_give_the_plain_ones("llama", *ROUNDS[3])


def requests() -> list[Request]:
    prompts = [(4, 5, 6, 7), (9, 10), (4, 5, 6, 7), (20, 21, 22, 23, 24, 25, 26, 27, 28, 29), (30,)]
    return [Request(prompt_ids=p, sample=100 + i, max_new_tokens=4 + 5 * i) for i, p in enumerate(prompts)]


def engine_for(model: nn.Module, nodes: int | None, slots: int, record: bool) -> Engine:
    proposer = None
    if nodes is not None:
        heads = FutureHeads.for_model(model)  # type: ignore[arg-type]
        nn.init.normal_(heads.second_BHF, std=0.3, generator=torch.Generator().manual_seed(0))
        proposer = HeadsProposer(heads, model)  # type: ignore[arg-type]
    budget, config = BudgetConfig(fixed_nodes=nodes), EngineConfig(max_running=slots)
    engine = Engine(model, proposer=proposer, budget=budget, config=config)
    if record:
        recorded(engine.target)
    return engine


@pytest.mark.parametrize("nodes", [None, 1, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_passes_change_no_token(architecture: str, nodes: int | None) -> None:
    """With sequences that end at different times, slots that are handed on and slots that stay empty."""
    model = tiny(architecture)
    for slots in (2, 64):
        kinds = [engine_for(model, nodes, slots, record).generate(requests(), SAMPLING) for record in (False, True)]
        plain, other = ([c.token_ids for c in rollout.completions] for rollout in kinds)
        assert other == plain


def test_an_output_lasts_until_the_next_pass_only() -> None:
    """What a graph's replay does to whoever keeps an output, `Eager` does too."""
    target = recorded(HFTarget(tiny("llama")))
    with target.rolling_out():
        filled(target, [5], 2)
        first = target.forward_tree(roots(torch.tensor([5])), torch.tensor([5]), 5)
        kept = first.logits_NV.clone()
        target.forward_tree(roots(torch.tensor([9])), torch.tensor([5]), 5)
    assert not torch.equal(first.logits_NV, kept)


# --- what may be recorded ---------------------------------------------------------------------------------------------


class Watched(Eager):
    """`Eager`, with an eye on what runs."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            with Forbid():
                run()

        return watched


@pytest.mark.parametrize("tree", [lambda: roots(torch.tensor([5, 6, 7])), lambda: some_trees(3, 11, 8)])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_recorded_waits_for_the_device(architecture: str, lora: bool, tree: Callable[[], Tree]) -> None:
    model: nn.Module = tiny(architecture)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    target = recorded(HFTarget(model), Watched())
    with target.rolling_out():
        filled(target, [12, 20, 3], 4)
        target.forward_tree(tree(), torch.tensor([12, 20, 3]), 20)
    assert target.recorded is not None and target.recorded.recordings == 1


@pytest.mark.parametrize("sin", ["item", "from the host", "boolean index"])
def test_waiting_for_the_device_would_be_noticed(sin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PaddedTreePass.__init__

    def sinful(self, cache, tree, length_X, live, seen_Nn):  # type: ignore[no-untyped-def]
        if sin == "item":
            length_X.max().item()
        if sin == "from the host":
            torch.tensor([1, 2])
        if sin == "boolean index":
            length_X[length_X > 3]
        original(self, cache, tree, length_X, live, seen_Nn)

    monkeypatch.setattr(PaddedTreePass, "__init__", sinful)
    with pytest.raises(RuntimeError, match="in a recorded pass"):
        test_nothing_recorded_waits_for_the_device("llama", False, lambda: some_trees(3, 11, 8))


class OnlyOn(TorchDispatchMode):
    """Fails on an operation that takes a tensor from elsewhere, as a capture would."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        elsewhere = {t.device.type for t in tensors} - {self.device}
        if elsewhere:
            raise RuntimeError(f"{func} takes a tensor from {elsewhere}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bug", [None, "index", "operand", "value"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_that_is_recorded_is_on_the_models_device(
    architecture: str, bug: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without values, where only shapes are computed: nothing is fetched from the host or asked for."""
    original = PaddedTreePass._lay_out

    def broken(self, tree, cell_N, seen_Nn):  # type: ignore[no-untyped-def]
        if bug == "index":
            seen_Nn[torch.arange(1)]
        if bug == "operand":
            seen_Nn = seen_Nn & torch.ones(1, dtype=torch.bool)
        if bug == "value":
            tree.depth_N.max().item()
        original(self, tree, cell_N, seen_Nn)

    monkeypatch.setattr(PaddedTreePass, "_lay_out", broken)
    target = HFTarget(tiny(architecture).to("meta"))
    cache = SlotCache(target.cache_shape, 4, 40)
    for size in (1, 4):
        with target.rolling_out(), nullcontext() if bug is None else pytest.raises(RuntimeError):
            inputs = _Recorded(Bucket(4, 4 * size, size, 40), target.device)
            with OnlyOn("meta"):
                out = target._padded(cache, inputs.tree, inputs.length_X, 40)
            assert out.logits_NV.shape == (4 * size, VOCAB_SIZE) and out.hidden_NH.device.type == "meta"


def test_a_model_that_cannot_be_recorded_runs_as_before_and_says_so_once() -> None:
    class Cannot(Eager):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            raise CaptureError("operation not permitted when stream is capturing")

    model = tiny("llama")
    expected = engine_for(model, 5, 4, record=False).generate(requests(), SAMPLING)
    engine = engine_for(model, 5, 4, record=False)
    recorded(engine.target, Cannot())
    with pytest.warns(RuntimeWarning, match="tiny cannot be recorded .* not permitted") as seen:
        rollout = engine.generate(requests(), SAMPLING)
    assert len(seen) == 1
    assert [c.token_ids for c in rollout.completions] == [c.token_ids for c in expected.completions]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(requests(), SAMPLING)
