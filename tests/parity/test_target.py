"""The installed model through our passes gives the logits of its own forward; slots hold what a fresh pass would."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MambaConfig, SmolLM3Config

from specroll.model import linear, packing
from specroll.model.adapter import Adapted, plain_lora
from specroll.model.attention import PromptPass, TreePass
from specroll.model.joint import Joint, together
from specroll.model.prove import TOLERANCE, UnsupportedModelError, decoy_chain, worst_difference
from specroll.model.target import HFTarget
from specroll.tree import rank
from specroll.types import Draft, Tree
from tiny import ARCHITECTURES, SHAPE, VOCAB_SIZE, tiny

TOKENS = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))  # longer than the sliding windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompt_and_tree_passes_give_the_models_own_logits(architecture: str, dtype: torch.dtype) -> None:
    worst = worst_difference(HFTarget(tiny(architecture, dtype=dtype)), TOKENS)
    assert worst <= (1e-5 if dtype == torch.float32 else TOLERANCE[dtype])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("bug", ["leaky mask", "stale mask", "wrong position", "prompt sees ahead"])
def test_planted_bugs_in_the_passes_are_noticed(architecture: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TreePass.__init__

    def broken(self, cache, tree, length_S, longest, seen_Nn):  # type: ignore[no-untyped-def]
        if bug == "leaky mask":
            seen_Nn = torch.ones_like(seen_Nn).tril()  # siblings see each other
        if bug == "stale mask":
            seen_Nn = torch.eye(tree.size, dtype=torch.bool)[tree.slot_N]  # as if each row were a root
        original(self, cache, tree, length_S, longest, seen_Nn)

    monkeypatch.setattr(TreePass, "__init__", broken)
    if bug == "wrong position":
        forward = HFTarget._forward
        monkeypatch.setattr(HFTarget, "_forward", lambda self, t, p, r, k: forward(self, t, p + (p > 25), r, k))
    if bug == "prompt sees ahead":
        monkeypatch.setattr(PromptPass, "_mask", lambda self, length, window, like: like.new_zeros(length, length))
    assert worst_difference(HFTarget(tiny(architecture)), TOKENS) > 1e-3


def uneven_trees(seed: int = 0) -> Tree:
    """Trees of 9, 1 and 4 rows or the like: the best 11 nodes of three sequences that know unequally much."""
    generator = torch.Generator().manual_seed(seed)
    hit_SKC = torch.rand(3, 3, 4, generator=generator) * torch.tensor([0.9, 0.05, 0.4]).view(3, 1, 1)
    token_SKC = torch.rand(3, 3, VOCAB_SIZE, generator=generator).argsort(-1)[..., :4]
    ranked = rank(Draft(token_SKC, hit_SKC.log(), hit_SKC), torch.tensor([5, 6, 7]), most=11, each=8)
    tree = ranked.plant(11)
    assert len(set(torch.bincount(tree.sequence_N).tolist())) > 1
    return tree


@pytest.mark.parametrize("bug", [None, "written elsewhere", "read elsewhere"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_uneven_trees_of_several_sequences_give_the_models_own_logits(
    architecture: str, bug: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every tree against the model's forward over its prompt and path, nothing else in the batch."""
    target, tree = HFTarget(tiny(architecture)), uneven_trees()
    original = TreePass.__init__

    def broken(self, *arguments):  # type: ignore[no-untyped-def]
        original(self, *arguments)
        if bug == "written elsewhere":
            self._write_X = self._write_X.roll(1)
        if bug == "read elsewhere":
            self._cell_N = self._cell_N.flip(0)

    monkeypatch.setattr(TreePass, "__init__", broken)
    prompts = [TOKENS[:n].tolist() for n in (12, 20, 3)]
    with target.rolling_out():
        cache = target.reserve(3, 40)
        for slot, kv in enumerate(target.prefill(prompts)[1]):
            cache.fill(slot, kv)
        out = target.forward_tree(tree, torch.tensor([12, 20, 3]), 20)
    expected = []
    for row in range(tree.token_N.numel()):
        path = [row]
        while tree.depth_N[path[0]]:
            path.insert(0, int(tree.parent_N[path[0]]))
        ids = prompts[int(tree.sequence_N[row])] + tree.token_N[path].tolist()
        with torch.no_grad():
            expected.append(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
    worst = (out.logits_NV - torch.stack(expected)).abs().max() / torch.stack(expected).abs().max()
    assert worst < 1e-5 if bug is None else worst > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kept_path_is_the_recomputed_prefix(architecture: str) -> None:
    """After compaction the slot holds what a fresh prompt pass over the same tokens leaves behind."""
    target = HFTarget(tiny(architecture))
    prefix = len(TOKENS) - 4
    with target.rolling_out():
        cache = target.reserve(2, 48)
        _, (kv,) = target.prefill([TOKENS[:prefix].tolist()])
        cache.fill(0, kv)
        target.forward_tree(decoy_chain(TOKENS[prefix:], VOCAB_SIZE), torch.tensor([prefix]), prefix)
        rows, places = torch.tensor([2, 4, 6]), torch.tensor([1, 2, 3])
        cache.compact(torch.zeros(3, dtype=torch.int64), prefix + rows, prefix + places)
        cache.move(0, 1, len(TOKENS))
        _, (fresh,) = target.prefill([TOKENS.tolist()])
    for slot in (0, 1):
        torch.testing.assert_close(cache.kv[:, :, slot, :, : len(TOKENS)], fresh, rtol=1e-4, atol=1e-5)


UNPROVED = {
    "smollm3": SmolLM3Config(**SHAPE),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=1),
}


@pytest.mark.parametrize("kind", UNPROVED)
def test_a_model_without_a_proof_is_proved_at_construction(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(UNPROVED[kind])
    for matrix in (m for m in model.parameters() if m.ndim == 2):
        torch.nn.init.normal_(matrix, std=0.4)
    assert worst_difference(HFTarget(model), TOKENS) < 1e-5
    forward = HFTarget._forward
    monkeypatch.setattr(HFTarget, "_forward", lambda self, t, p, r, k: forward(self, t, p // 2, r, k))
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        HFTarget(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Gemma2Config(**SHAPE, head_dim=16),
            "soft-capped",
        ),
        (
            MambaConfig(
                vocab_size=61, hidden_size=32, num_hidden_layers=2, eos_token_id=1, bos_token_id=1, pad_token_id=0
            ),
            "recurrent state",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(config: object, reason: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        HFTarget(model)
    assert type(model).__name__ in str(error.value) and "Use transformers' own generate" in str(error.value)


def test_a_changing_rotary_embedding_is_refused() -> None:
    model = tiny("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="rotary embedding"):
        HFTarget(model)


def test_an_unknown_attention_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFTarget(tiny("llama"))
    with target.rolling_out(), pytest.raises(NotImplementedError, match="sinks"):
        attention = target.causal.model.layers[0].self_attn
        forward = attention.forward
        monkeypatch.setattr(attention, "forward", lambda *a, **k: forward(*a, sinks=torch.ones(1), **k))
        target.prefill([[3, 4, 5]])


@pytest.mark.parametrize("adapted", [False, True])
def test_the_model_is_left_as_it_was_found(adapted: bool) -> None:
    model = tiny("llama")
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5))
    model.train()
    frozen = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    frozen.eval()
    target = HFTarget(model)
    before = target.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), target.rolling_out():
        assert not any(m.training for m in model.modules())
        target.prefill([[3, 4, 5]])
        raise RuntimeError("inside")
    assert all(m.training for m in model.modules() if m is not frozen) and not frozen.training
    assert target.config._attn_implementation == before
    assert not any("forward" in vars(m) for m in model.modules())
    assert model(torch.tensor([[3, 4, 5]])).logits.requires_grad


def adapted(model: torch.nn.Module, **changes: object) -> torch.nn.Module:
    """With LoRA on all layers whose weights are away from their start."""
    settings = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "lora_dropout": 0.5, **changes}
    model = get_peft_model(model, LoraConfig(**settings)).eval()  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3"])
def test_lora_layers_in_fewer_steps_give_the_models_own_logits(architecture: str, dtype: torch.dtype) -> None:
    model = adapted(tiny(architecture, dtype=dtype))
    target = HFTarget(model)
    worst = worst_difference(target, TOKENS)
    assert worst <= (1e-5 if dtype == torch.float32 else TOLERANCE[dtype])
    with target.rolling_out():
        swapped = [m for m in model.modules() if plain_lora(m) is not None and "forward" in vars(m)]
    assert len(swapped) == len([m for m in model.modules() if plain_lora(m) is not None]) > 0


def test_a_wrong_scale_of_an_adapter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Adapted.__init__
    monkeypatch.setattr(Adapted, "__init__", lambda self, base, down, up_RO: begin(self, base, down, up_RO * 1.1))
    assert worst_difference(HFTarget(adapted(tiny("llama"))), TOKENS) > 1e-3


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*:peft.utils.warning.PeftWarning")
@pytest.mark.parametrize("kind", ["dora", "bias", "two adapters", "disabled", "merged"])
def test_other_adapters_keep_their_own_forward(kind: str) -> None:
    model = adapted(tiny("llama"), **{"use_dora": kind == "dora", "lora_bias": kind == "bias"})
    if kind == "two adapters":
        model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
        model.base_model.set_adapter(["default", "second"])
    if kind == "disabled":
        model.disable_adapter_layers()
    if kind == "merged":
        model.merge_adapter()
    assert not any(plain_lora(m) for m in model.modules())
    assert worst_difference(HFTarget(model), TOKENS) < 1e-5


class TestJoint:
    def test_one_product_gives_all_layers_their_outputs(self) -> None:
        seen = []

        def product(x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.cat((x, 2 * x, 3 * x), -1)

        first, second, third = Joint(product, [2, 2, 2]).parts
        x, y = torch.ones(1, 2), torch.full((1, 2), 5.0)
        assert [int(part(x)[0, 0]) for part in (first, second, third)] == [1, 2, 3] and len(seen) == 1
        # In another order, and with an input that has changed in between: slower, never stale.
        assert [int(part(z)[0, 0]) for part, z in ((third, x), (first, y), (second, x), (third, y))] == [3, 5, 2, 15]

    def test_siblings_with_one_input_are_found_and_the_rest_stand_alone(self) -> None:
        model = tiny("llama")
        model.model.layers[1].mlp.up_proj.forward = lambda x: x  # somebody else's
        groups = list(together(model, lambda m: m if type(m) is torch.nn.Linear else None))
        layers = len(model.model.layers)
        assert sorted(map(len, groups)) == [1] * (2 * layers + 1 + 1) + [2] * (layers - 1) + [3] * layers
        assert len({layer for group in groups for layer in group}) == 7 * layers + 1 - 1


@pytest.mark.skipif(not linear.packing_pays(), reason="this processor has no packed products")
class TestPackedLinears:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("bug", [None, "parts exchanged"])
    def test_packs_of_several_layers_give_the_models_own_logits(
        self, architecture: str, bug: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear, "_SMALLEST", 1)
        if bug:
            parts = Joint.parts.fget
            monkeypatch.setattr(
                Joint, "parts", property(lambda self: [*parts(self)[:-2], parts(self)[-1], parts(self)[-2]])
            )
        model = tiny(architecture)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        target = HFTarget(model)
        worst = worst_difference(target, TOKENS)
        assert worst < 1e-5 if bug is None or architecture == "phi3" else worst > 1e-3
        assert target._packed.count > 4

    def test_a_group_that_cannot_be_packed_leaves_its_other_layers_packed(self) -> None:
        model = tiny("llama")
        attention = model.model.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = torch.nn.Linear(400, 300, bias=name == "k_proj")
            layer.weight.data = layer.weight.data.bfloat16().float()
            setattr(attention, name, layer)
        x = torch.randn(1, 400)
        layers = attention.q_proj, attention.k_proj, attention.v_proj
        expected = [layer(x) for layer in layers]
        packs = linear.PackedLinears(attention)
        with packs.in_use():
            torch.testing.assert_close([layer(x) for layer in layers], expected, rtol=1e-4, atol=1e-4)
        assert packs.count == 3 and len(packs._packed) == 2  # together; and the one that is too small
        with torch.no_grad():
            attention.q_proj.weight.normal_()  # float16 does not hold it
        with packs.in_use():
            assert "forward" not in vars(attention.q_proj) and "forward" in vars(attention.k_proj)
        assert packs.count == 2

    def test_a_pack_is_the_product(self) -> None:
        weight = torch.randn(300, 400).bfloat16()
        product = linear.pack(weight.float())
        assert product is not None
        x = torch.randn(3, 400)
        torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight.float()), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize("make", [packing.fbgemm, packing.onednn])
    @pytest.mark.parametrize("rows", [(1,), (2, 3)])
    def test_each_kind_is_the_product(self, make: packing.Packer, biased: bool, rows: tuple[int, ...]) -> None:
        """Wherever it is used by itself: oneDNN emulates what the processor lacks."""
        weight, x = torch.randn(300, 400).bfloat16(), torch.randn(*rows, 400).bfloat16()
        bias = 9 * torch.randn(300).bfloat16() if biased else None
        product = make(weight, bias, None)
        assert product is not None
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert product(x).dtype == torch.bfloat16
        torch.testing.assert_close(product(x).float(), expected, rtol=1e-2, atol=2e-1)
        proposing = make(weight.float(), bias, torch.bfloat16)
        assert proposing is not None and proposing(x.float()).dtype == torch.float32
        torch.testing.assert_close(proposing(x.float()), expected, rtol=1e-2, atol=2e-1)

    def test_each_dtype_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for units, of_bfloat16 in ((True, packing.onednn), (False, packing.fbgemm)):
            monkeypatch.setattr(packing, "multiplies_bfloat16", lambda device, units=units: units)
            packing.packer.cache_clear()
            assert packing.packer(torch.bfloat16) is of_bfloat16 and packing.packer(torch.float32) is packing.fbgemm
        packing.packer.cache_clear()

    def test_weights_that_float16_cannot_hold_are_not_packed(self) -> None:
        assert linear.pack(torch.randn(300, 400)) is None
        assert linear.pack((torch.randn(300, 400).bfloat16() * 1e5).float()) is None
        assert linear.pack(torch.full((300, 400), float("nan"))) is None
        assert linear.pack(torch.randn(300, 400), rounded_to=torch.float32) is not None

    def test_a_changed_weight_is_packed_again(self) -> None:
        layer = torch.nn.Linear(400, 300, bias=False)
        layer.weight.data = layer.weight.data.bfloat16().float()
        packs = linear.PackedLinears(layer)
        x = torch.randn(1, 400)
        with torch.no_grad():
            with packs.in_use():
                before = layer(x)
            layer.weight.mul_(2)
            with packs.in_use():
                after = layer(x)
        assert packs.count == 1
        torch.testing.assert_close(after, 2 * before)

    def test_engines_of_one_model_share_its_packs_and_free_them_with_it(self) -> None:
        model = tiny("llama")
        assert linear.PackedLinears.of(model) is linear.PackedLinears.of(model)
        assert linear.PackedLinears.of(model) is not linear.PackedLinears.of(tiny("llama"))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
