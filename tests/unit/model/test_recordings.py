"""When recorded passes are dropped and made anew, and the buckets that they are made for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recorded import TOKENS, filled, recorded
from torch import nn

from specroll.device import Eager
from specroll.model import graphs
from specroll.model.cache import CacheShape, SlotCache
from specroll.model.graphs import Bucket, RecordedPasses, bucket_of
from specroll.model.prove import worst_difference
from specroll.model.target import HFTarget
from specroll.tree.grow import roots
from specroll.types import TargetOutput, Tree
from tiny import tiny

CPU = torch.device("cpu")


# --- when recordings are dropped --------------------------------------------------------------------------------------


class Counting(Eager):
    def __init__(self) -> None:
        self.forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1


def counted(model: nn.Module) -> tuple[HFTarget, RecordedPasses, Counting]:
    recorder = Counting()
    target = recorded(HFTarget(model), recorder)
    assert target.recorded is not None
    one_pass(target)
    return target, target.recorded, recorder


def one_pass(target: HFTarget, slots: int = 2) -> None:
    with target.rolling_out():
        if target.cache is None or not target.cache.holds(slots, 40):
            filled(target, [5], slots)
        target.forward_tree(roots(torch.tensor([5])), torch.tensor([5]), 5)


def adapted(model: nn.Module, **settings: object) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", **settings)).eval()  # type: ignore[arg-type]


def new_values(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize("make", [lambda: tiny("llama"), lambda: adapted(tiny("llama"))], ids=["whole", "adapter"])
def test_new_values_in_old_weights_need_no_new_recording(make: Callable[[], nn.Module]) -> None:
    target, passes, recorder = counted(make())
    new_values(target.model)
    one_pass(target)
    assert (passes.recordings, recorder.forgotten) == (1, 0)
    assert worst_difference(target, TOKENS) < 1e-5


def test_other_weights_need_a_new_recording() -> None:
    target, passes, recorder = counted(tiny("llama"))
    target.causal.model.norm.weight = nn.Parameter(target.causal.model.norm.weight.detach() * 2)
    one_pass(target)
    assert (passes.recordings, recorder.forgotten) == (2, 1)


@pytest.mark.parametrize("change", ["scaling", "disabled", "second"])
def test_an_adapter_that_computes_otherwise_needs_a_new_recording(change: str) -> None:
    model = adapted(tiny("llama"), use_dora=change == "scaling")
    if change == "second":
        model.add_adapter("second", LoraConfig(r=3, target_modules="all-linear"))  # type: ignore[operator]
    target, passes, recorder = counted(model)
    if change == "scaling":
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.5)
    if change == "disabled":
        model.base_model.disable_adapter_layers()  # type: ignore[operator]
    if change == "second":
        model.set_adapter("second")  # type: ignore[operator]
    one_pass(target)
    assert (passes.recordings, recorder.forgotten) == (2, 1)


def test_other_slots_need_a_new_recording_and_the_same_ones_do_not() -> None:
    target, passes, recorder = counted(tiny("llama"))
    one_pass(target)
    assert passes.recordings == 1
    first = target.cache
    one_pass(target, slots=3)
    assert target.cache is not first and (passes.recordings, recorder.forgotten) == (2, 1)
    # A measurement looks at the same memory as other slots, and goes back.
    whole = target.cache
    assert whole is not None
    with target.rolling_out():
        target.cache = whole.regrouped(1, whole.length)
        target.forward_tree(roots(torch.tensor([5])), torch.tensor([5]), 5)
        target.cache = whole
        target.forward_tree(roots(torch.tensor([5])), torch.tensor([5]), 5)
    assert (passes.recordings, recorder.forgotten) == (3, 1)


def test_few_recordings_are_held_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST", 2)
    target = recorded(HFTarget(tiny("llama")))
    passes, made = target.recorded, []
    assert passes is not None
    with target.rolling_out():
        filled(target, [5, 5, 5], 3)
        for running in (1, 2, 1, 3, 1, 2):
            target.forward_tree(roots(torch.arange(running) + 5), torch.tensor([5] * running), 5)
            made.append(passes.recordings)
    assert made == [1, 2, 2, 3, 3, 4] and len(passes._held) == 2


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_buckets_hold_the_trees_within_the_slots() -> None:
    shape = CacheShape(1, 1, 1, torch.float32, CPU)
    for slots, length in ((1, 30), (5, 200), (64, 1000)):
        cache = SlotCache(shape, slots, length)
        for running in (1, 2, 5, 7, 33, 64):
            for nodes in (0, 1, 3, 9, 16):
                for longest in (1, 100, 700):
                    if running > slots or longest + 1 + nodes > length:
                        continue
                    tree = Tree(*(torch.zeros(running * (1 + nodes)),) * 6, size=1 + nodes, max_depth=nodes)
                    bucket = bucket_of(cache, tree, running, longest)
                    assert running <= bucket.running <= slots
                    assert 1 + nodes <= bucket.size and (bucket.size == 1) == (nodes == 0)
                    assert running * (1 + nodes) <= bucket.rows <= bucket.running * bucket.size
                    assert longest + 1 + nodes <= bucket.live <= length


def test_buckets_are_few() -> None:
    cache = SlotCache(CacheShape(1, 1, 1, torch.float32, CPU), 64, 4096)

    def bucket(running: int, longest: int) -> Bucket:
        return bucket_of(cache, roots(torch.arange(running)), running, longest)

    assert len({bucket(running, 100) for running in range(1, 65)}) == 12
    assert len({bucket(1, longest) for longest in range(1, 4095)}) == 11


def test_the_cpu_runs_unpadded() -> None:
    target = HFTarget(tiny("llama"))
    one_pass(target)
    assert target.recorded is None


def test_output_buffers_grow_and_old_recordings_keep_theirs() -> None:
    passes = RecordedPasses(Eager(), CPU, "counting")
    cache = SlotCache(CacheShape(1, 1, 1, torch.float32, CPU), 4, 200)

    def forward(cache: SlotCache, tree: Tree, length_X: torch.Tensor, live: int) -> TargetOutput:
        return TargetOutput(tree.token_N[:, None].float(), tree.depth_N[:, None].float())

    for running in (1, 4, 1):
        out = passes.run(forward, cache, roots(torch.arange(running) + 5), torch.ones(running, dtype=torch.int64), 1)
        assert out is not None and out.logits_NV.flatten().tolist() == [5.0 + i for i in range(running)]
