"""The roofline's products are those of a rollout, once each, as keys and values; its share is of plain rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specroll.bench import roofline as module
from specroll.bench.roofline import products_seconds, roofline
from specroll.model import linear
from specroll.model.target import HFTarget
from specroll.types import RoundStats
from tiny import tiny

PASSES = 1 + module._REPEATS


def test_every_layer_runs_once_a_pass_on_rows_of_its_own_width() -> None:
    target = HFTarget(tiny("llama"))
    seen: dict[str, list[tuple[int, ...]]] = {}
    for name, layer in target.causal.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, x, name=name: seen.setdefault(name, []).append(x[0].shape))
    assert products_seconds(target, 3) > 0
    assert len(seen) == 2 * 7 + 1 and "lm_head" in seen  # q, k, v, o, gate, up, down of two layers
    width = {"down_proj": 48}
    assert all(of == [(1, 3, width.get(name.split(".")[-1], 32))] * PASSES for name, of in seen.items())


def test_packed_layers_run_packed_and_siblings_together(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def pack(weight: torch.Tensor, bias: Any = None, **others: Any) -> Any:
        def product(x: torch.Tensor) -> torch.Tensor:
            widths.append(weight.shape[0])
            return F.linear(x, weight, bias)

        return product

    monkeypatch.setattr(linear, "packing_pays", lambda: True)
    monkeypatch.setattr(linear, "pack", pack)
    products_seconds(HFTarget(tiny("llama")), 2)
    of_a_layer = [32 + 16 + 16, 32, 48 + 48, 32]  # q with k and v, o, gate with up, down
    assert sorted(widths) == sorted((of_a_layer * 2 + [61]) * PASSES)


def test_the_share_is_of_full_rounds_without_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.01, *[0.5] * 5, 0.375, *[0.5] * 9])  # the first pass prepares things and does not count
    monkeypatch.setattr(module, "_pass", lambda *_: next(times))
    rounds = [RoundStats(2, seconds={"prefill": 9.0, "verify": v, "draw": 0.25}) for v in (0.5, 0.25, 8.0)]
    rounds += [RoundStats(1, seconds={"verify": 0.001})] * 9
    target = HFTarget(tiny("llama"))
    read: list[int] = []
    monkeypatch.setattr(module, "_sum", lambda words: read.append(words.numel()) or 0.1875)
    limit = {"products_seconds": 0.375, "kv_seconds": 0.1875, "round_seconds": 0.75, "share": 0.75}
    assert roofline(target, rounds, 2, context=5.5) == limit
    assert read == [11 * 2 * 2 * 2 * 8] * PASSES  # tokens, layers, keys and values, heads of 8: as float32
    assert roofline(target, rounds, 3, context=5.5) is None


def test_bytes_are_read_as_words() -> None:
    assert 0 < module.reading_seconds(torch.device("cpu"), 4 << 10) < 1
    assert module.reading_seconds(torch.device("cpu"), 0) >= 0
