"""The default model is the instruct model that it claims to be: its words, its turns, its ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open

from specroll.model import default

RealModel = tuple[Any, Any]


def test_digits_are_split_off_before_anything_else(real_model: RealModel) -> None:
    """The original tokenizer's ids. Without its digit rule, blanks before a digit are cut differently."""
    _, tokenizer = real_model
    newline, two_newlines, one = (tokenizer.convert_tokens_to_ids(token) for token in ("Ċ", "ĊĊ", "1"))
    assert tokenizer("\n\n1")["input_ids"] == [two_newlines, one]
    assert tokenizer("\n1")["input_ids"] == [newline, one]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  123")["input_ids"]) == ["a", "ĠĠ", "1", "2", "3"]


@pytest.mark.parametrize("text", ["  a\n\n b\t", "don't stop, 1,234.5 (x) .", "é ☃ 漢字", "x = [1,  2]"])
def test_text_survives_the_tokenizer(real_model: RealModel, text: str) -> None:
    _, tokenizer = real_model
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_conversation_is_written_in_turns(real_model: RealModel) -> None:
    _, tokenizer = real_model
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert ids.count(1) == 3 and ids.count(2) == 2  # each mark is one token


def test_a_turn_and_a_document_end_a_response(real_model: RealModel) -> None:
    model, tokenizer = real_model
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.convert_ids_to_tokens([2, 0]) == ["<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)


def test_the_head_is_tied_and_the_folder_holds_plain_bfloat16(real_model: RealModel) -> None:
    model, _ = real_model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with safe_open(default.folder() / "model.safetensors", framework="pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {"torch.bfloat16"}  # noqa: SIM118
    assert "quantization_config" not in json.loads((default.folder() / "config.json").read_text())


def test_it_answers_and_stops(real_model: RealModel) -> None:
    model, tokenizer = real_model
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == 2
