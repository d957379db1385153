"""Loading by name: what is accepted, and the words for what is not."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from specroll import device
from specroll.model import load
from specroll.model.load import load_model, native_dtype
from tiny import EOS, PAD, tiny, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "llama"
    tiny("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_local_folder_comes_back_as_it_was_saved(folder: Path) -> None:
    model, tokenizer = load_model(str(folder), dtype="float32", device="cpu")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model(ids).logits, tiny("llama")(ids).logits)
    assert not model.training
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    assert tokenizer.decode(tokenizer("1 + 2 = ?")["input_ids"]) == "1 + 2 = ?"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: Any) -> None:
    assert load_model(str(folder), dtype=dtype, device="cpu")[0].dtype == torch.bfloat16


def test_auto_is_the_native_dtype(folder: Path) -> None:
    assert load_model(str(folder), device="cpu")[0].dtype == native_dtype("cpu")


def test_a_tokenizer_without_padding_pads_with_eos(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert load_model(str(folder), device="cpu")[1].pad_token_id == EOS


@pytest.mark.parametrize(("units", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_only_where_the_cpu_has_units_for_it(
    monkeypatch: pytest.MonkeyPatch, units: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(load, "multiplies_bfloat16", device.multiplies_bfloat16)  # not what all tests share
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units)
    assert native_dtype("cpu") == expected


@pytest.mark.parametrize("name", ["./not/here", "/not/here", "~/not-here-either", "a/b/c", ".."])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no folder|is no model folder"):
        load_model(name, device="cpu")


def test_a_hub_name_without_the_hub() -> None:
    with pytest.raises(ValueError, match="hub cannot be reached"):
        load_model("owner/some-model-that-nobody-downloaded", device="cpu")


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(str(tmp_path), device="cpu")


def test_weights_in_another_format_are_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        load_model(str(folder), device="cpu")


def test_a_cut_weights_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load_model(str(folder), device="cpu")


def _without_head(weights: dict[str, torch.Tensor]) -> None:
    del weights["lm_head.weight"]


def _with_a_narrower_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()


@pytest.mark.parametrize("harm", [_without_head, _with_a_narrower_head])
def test_weights_that_do_not_fill_the_model(folder: Path, harm: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    harm(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_model(str(folder), device="cpu")


def test_code_of_a_model_repository_is_never_run(folder: Path) -> None:
    (folder / "modeling.py").write_text("raise SystemExit('this must not run')")
    rewrite_config(
        folder, model_type="mine", auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    )
    with pytest.raises(ValueError, match="code of its own"):
        load_model(str(folder), device="cpu")


def test_a_model_type_that_transformers_does_not_know(folder: Path) -> None:
    rewrite_config(folder, model_type="mine")
    with pytest.raises(ValueError, match="does not recognize"):
        load_model(str(folder), device="cpu")


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        load_model(str(folder), device="cpu")


def _bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(vocab_size=61, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )


def _t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1))


@pytest.mark.parametrize("build", [_bert, _t5])
def test_only_causal_language_models(tmp_path: Path, build: Any) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{type(model).__name__}, not a causal language model"):
        load_model(str(tmp_path), device="cpu")


def test_an_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ValueError, match="float32"):
        load_model(str(folder), dtype="int8", device="cpu")
