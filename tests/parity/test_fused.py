"""Layers that run as compiled programs give the logits of the installed code, or run as they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from specroll.device import multiplies_bfloat16
from specroll.engine import Engine
from specroll.model import fused, linear, trace
from specroll.model.fused import FusedLayers
from specroll.model.linear import packing_pays
from specroll.model.prove import TOLERANCE, worst_difference
from specroll.model.target import HFTarget
from specroll.propose.proposer import HeadsProposer
from specroll.types import Request, SamplingParams
from tiny import ARCHITECTURES, EOS, VOCAB_SIZE, tiny, tiny_heads

TOKENS = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))  # longer than the sliding windows
QUICK = ("llama", "gemma3")  # one kind of layer, and several


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SMALLEST", 0)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


def count(target: HFTarget) -> int:
    """Layers that run as programs in a rollout of this target."""
    with target.rolling_out():
        target.prefill([[3, 4, 5]])
        return FusedLayers.of(target.causal).count


def programs(target: HFTarget) -> int:
    """Kinds of layers that have programs, each one for prompts and one for trees."""
    made, odd = divmod(len(FusedLayers.of(target.causal)._programs), 2)
    assert not odd
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "architecture", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES]
)
def test_fused_layers_give_the_models_own_logits(architecture: str, dtype: torch.dtype) -> None:
    target = HFTarget(tiny(architecture, dtype=dtype))
    assert worst_difference(target, TOKENS) <= (1e-5 if dtype == torch.float32 else TOLERANCE[dtype])
    assert count(target) == len(target.causal.model.layers)


@pytest.fixture
def llama() -> HFTarget:
    return HFTarget(tiny("llama"))


def test_layers_that_differ_in_weights_alone_share_a_program(llama: HFTarget) -> None:
    assert count(llama) == 2 and programs(llama) == 1
    llama.causal.model.layers[1].input_layernorm.variance_epsilon = 0.1
    assert count(llama) == 2 and programs(llama) == 2
    assert worst_difference(llama, TOKENS) < 1e-5


def test_what_training_changes_is_read_anew(llama: HFTarget) -> None:
    before = worst_difference(llama, TOKENS)
    with torch.no_grad():
        for parameter in llama.causal.parameters():
            parameter.mul_(1.2)
    llama.causal.model.layers[0].input_layernorm.weight = torch.nn.Parameter(torch.full((32,), 0.7))
    assert count(llama) == 2
    assert before < 1e-5 and worst_difference(llama, TOKENS) < 1e-5


@pytest.mark.skipif(not packing_pays(), reason="no packed products on this processor")
def test_packs_come_and_go_with_the_values_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings that are multiplied together leave their outputs side by side, others each by itself."""
    monkeypatch.setattr(linear, "_SMALLEST", 0)
    model = tiny("llama").bfloat16().float()  # what float16 holds
    target = HFTarget(model)
    assert worst_difference(target, TOKENS) < 1e-5 and target._packed.count > 0
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.0 + 1e-3)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.0 + 1e-3)
    assert worst_difference(target, TOKENS) < 1e-5 and count(target) == 2
    assert programs(target) == 3


@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason="no bfloat16 packs on this processor")
def test_packed_products_with_biases_are_inside_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SMALLEST", 0)
    model = tiny("qwen2", dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.fill_(0.5)
    target = HFTarget(model)
    assert count(target) == 2 and target._packed.count > 0, "each layer's program agreed with its own forward"
    assert worst_difference(target, TOKENS) <= 2 * TOLERANCE[torch.bfloat16]  # so few weights round much


@pytest.mark.parametrize("kind", ["all", "some", "merged", "dora"])
def test_adapters_run_inside_fused_layers(kind: str) -> None:
    layers = ["q_proj", "v_proj", "down_proj"] if kind == "some" else "all-linear"
    settings = LoraConfig(r=3, target_modules=layers, lora_dropout=0.5, use_dora=kind == "dora")
    model = get_peft_model(tiny("llama"), settings).eval()

    def teach() -> None:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.4)

    teach()
    if kind == "merged":
        model.merge_adapter()
    target = HFTarget(model)
    assert count(target) == 2 and worst_difference(target, TOKENS) < 1e-5
    teach()
    assert worst_difference(target, TOKENS) < 1e-5


@pytest.mark.parametrize("nodes", [1, 8])
def test_tokens_are_the_same_fused_or_not_drafted_or_not(
    nodes: int, known_curve: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rollout(drafted: bool) -> list[list[int]]:
        model = tiny("llama")
        proposer = HeadsProposer(tiny_heads(), model) if drafted else None
        requests = [Request(prompt_ids=(3, 4, 5 + i), sample=i, max_new_tokens=12) for i in range(nodes)]
        engine = Engine(model, proposer=proposer, eos_ids=[EOS])
        return [c.token_ids for c in engine.generate(requests, SamplingParams(seed=3, top_p=0.95)).completions]

    plain, drafted = rollout(False), rollout(True)
    monkeypatch.setattr(fused, "SMALLEST", 1 << 40)
    assert plain == drafted == rollout(False)


def test_layers_are_left_as_they_were_found(llama: HFTarget) -> None:
    with pytest.raises(RuntimeError, match="inside"), llama.rolling_out():
        llama.prefill([[3, 4, 5]])
        assert all("forward" in vars(layer) for layer in llama.causal.model.layers)
        raise RuntimeError("inside")
    assert not any("forward" in vars(module) for module in llama.causal.modules())
    assert llama.causal(torch.tensor([[3, 4, 5]])).logits.requires_grad


def test_inputs_of_another_kind_meet_the_layers_own_forward(llama: HFTarget) -> None:
    """The program was made for what the model passes in a rollout; nobody else's call may end in it."""
    layer = llama.causal.model.layers[0]
    with llama.rolling_out():
        llama.prefill([[3, 4, 5]])
        with pytest.raises(TypeError, match="cannot unpack"):
            layer(torch.zeros(1, 3, 32), position_embeddings=None)


def small(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SMALLEST", 1 << 40)


def switched_off(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def hooked(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target.causal.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def hooked_linear(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target.causal.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda *_: None)


def replaced(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = target.causal.model.layers[0].input_layernorm
    norm.forward = norm.forward


def all_different(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_MOST_KINDS", 1)
    target.causal.model.layers[1].input_layernorm.variance_epsilon = 0.1


@pytest.mark.parametrize("obstacle", [small, switched_off, hooked, hooked_linear, replaced, all_different])
def test_where_fusing_is_no_good_layers_run_as_they_are(
    obstacle: Any, llama: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle(llama, monkeypatch)
    assert count(llama) == 0 and worst_difference(llama, TOKENS) < 1e-5


def test_under_autocast_layers_run_as_they_are(llama: HFTarget) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert count(llama) == 0
    assert not FusedLayers.of(llama.causal)._programs


def test_without_a_compiler_layers_run_as_they_are_and_it_is_told_once(
    llama: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        caplog.at_level(logging.WARNING, "specroll.model.fused"),
    ):
        assert count(llama) == 0 and worst_difference(llama, TOKENS) < 1e-5
    told = [r.getMessage() for r in caplog.records if r.name == "specroll.model.fused"]
    assert len(told) == 1 and "C++ compiler" in told[0] and "LlamaDecoderLayer" in told[0]


def wrong_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = trace.compiled

    def broken(graph):  # type: ignore[no-untyped-def]
        run, pieces = compiled(graph)
        last = pieces[-1]
        return run, [*pieces[:-1], lambda given: [last(given)[0] * 1.5]]

    monkeypatch.setattr(fused, "compiled", broken)


def test_a_program_that_is_wrong_is_not_used(
    llama: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_stage(monkeypatch)
    with caplog.at_level(logging.WARNING, "specroll.model.fused"):
        assert count(llama) == 0 and worst_difference(llama, TOKENS) < 1e-5
    assert "off by" in caplog.text


def test_a_program_that_leaves_something_else_in_slots_is_not_used(
    llama: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its output may be right: what it spoils is another sequence's."""
    attend = trace.attend_slots

    def scribbling(query: Any, key: Any, value: Any, scale: float, key_memory: Any, *others: Any) -> Any:
        out = attend(query, key, value, scale, key_memory, *others)
        key_memory[-1].fill_(0.5)  # a slot that is not in use
        return out

    monkeypatch.setattr(trace, "attend_slots", scribbling)
    with caplog.at_level(logging.WARNING, "specroll.model.fused"):
        assert count(llama) == 2, "prompts have programs all the same"
    assert "off by" in caplog.text and worst_difference(llama, TOKENS) < 1e-5


def test_a_program_for_other_inputs_is_another(llama: HFTarget) -> None:
    assert count(llama) == 2
    llama.causal.to(torch.bfloat16)
    assert count(llama) == 2 and programs(llama) == 2
    assert worst_difference(llama, TOKENS) <= TOLERANCE[torch.bfloat16]
