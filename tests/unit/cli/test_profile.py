"""`specroll profile` on a tiny model: the stages add up, the documented keys are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specroll.bench.profile import STAGES, _kind, pass_milliseconds
from specroll.config import HeadsConfig
from specroll.engine import Engine
from specroll.model.load import load_model
from specroll.propose.heads import FutureHeads
from specroll.propose.store import save_heads
from tiny import tiny


@pytest.mark.parametrize("with_heads", [True, False])
def test_the_documented_keys_are_there(
    specroll: Callable,  # type: ignore[type-arg]
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_heads: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "questions.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 3)
    heads = []
    if with_heads:
        model, _ = load_model(str(tiny_folder))
        save_heads(FutureHeads.for_model(model, HeadsConfig(horizons=2)), tmp_path / "heads", model)
        heads = ["--heads", tmp_path / "heads"]
    options = ("--task", tmp_path / "questions.jsonl", "--running", 1, 2, "--tokens", 4, "--repeats", 1)
    done = specroll("profile", "--model", tiny_folder, *options, *heads, "--json", tmp_path / "profile.json")
    assert done.code == 0 and "Latency surface" in done.out
    result = json.loads((tmp_path / "profile.json").read_text())
    assert set(result["round_ms"]) == set(result["pass_ms"]) == {"1", "2"}
    kinds = result["round_ms"]["2"]
    assert set(kinds) == {"plain", "spec"} if with_heads else {"plain"}
    for stages in kinds.values():
        assert stages["round"] == pytest.approx(sum(stages[s] for s in STAGES)) and stages["verify"] > 0
    assert kinds["plain"]["propose"] < kinds["plain"]["verify"] and kinds["plain"]["tokens_per_round"] == 1
    assert len(result["surface_s"]) > 3 and set(result["context_s"]) == {"per_sequence", "per_row"}


def test_a_pass_is_products_attention_other_operations_and_the_host() -> None:
    parts = pass_milliseconds(Engine(tiny("llama"), eos_ids=[]), 2)
    total = parts.pop("pass")
    assert all(value > 0 for name, value in parts.items() if name != "host")
    assert sum(parts.values()) >= total * 0.999
    kinds = {
        "quantized::linear_dynamic_fp16": "products",
        "aten::addmm": "products",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "aten::mul": "other operations",
    }
    assert {name: _kind(name) for name in kinds} == kinds
    assert torch.is_grad_enabled()


def test_bad_settings_are_refused_at_once(specroll: Callable) -> None:  # type: ignore[type-arg]
    assert specroll("profile", "--running", 0).code == 2
    assert specroll("profile", "--tokens", 0).code == 2
