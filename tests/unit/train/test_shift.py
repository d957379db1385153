"""Two tasks in one data set, and other weights under a policy with adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from specroll.train.data import Task
from specroll.train.shift import check_alike, in_turn, take_weights
from tiny import tiny

LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def task(name: str, **columns: Any) -> Task:
    rows = [{"prompt": [{"role": "user", "content": f"{name}{i}"}], "answer": str(i), **columns} for i in range(3)]

    def reward(completions: list[str], answer: list[str], **others: Any) -> list[float]:
        assert others["prompts"] and set(others) >= set(columns)
        return [len(name) + 10 * (c == a) for c, a in zip(completions, answer, strict=True)]

    return Task(name, Dataset.from_list(rows), [reward, reward], "boxed")


def test_rows_and_rewards_follow_their_tasks() -> None:
    dataset, reward = in_turn([(task("a", entry="e"), 4), (task("bb", solution="s"), 5)], seed=3)
    assert len(dataset) == 9 and list(dataset["phase"]) == [0] * 4 + [1] * 5
    texts = [row[-1]["content"] for row in dataset["prompt"]]
    assert all(text.startswith("a") for text in texts[:4]) and all(text.startswith("bb") for text in texts[4:])
    assert set(texts[:3]) == {"a0", "a1", "a2"}  # a pass over the whole set, then the next
    assert list(dataset["entry"]) == ["e"] * 4 + [None] * 5 and list(dataset["solution"]) == [None] * 4 + ["s"] * 5
    columns = ("phase", "answer", "entry", "solution")
    for rows in (range(4), range(4, 9)):
        given = {column: [dataset[column][i] for i in rows] for column in columns}
        scores = reward(prompts=["x"] * len(rows), completions=["0"] * len(rows), completion_ids=[], **given)
        name = 1 if rows.start == 0 else 2
        assert scores == [2.0 * (name + 10 * (dataset["answer"][i] == "0")) for i in rows]
    assert list(in_turn([(task("a"), 4)], seed=3)[0]["answer"]) == list(dataset["answer"])[:4]
    orders = [list(in_turn([(task("a"), 9)], seed=seed)[0]["answer"]) for seed in (3, 4)]
    assert orders[0] != orders[1]


def test_weights_change_in_place_and_adapters_stay() -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    token = torch.arange(3, 9)[None]
    wrapped: Any = get_peft_model(model, LORA)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    expected: Any = get_peft_model(copy.deepcopy(other), LORA)
    expected.load_state_dict({n: p for n, p in wrapped.state_dict().items() if "lora_" in n}, strict=False)
    places = {name: p.data_ptr() for name, p in wrapped.named_parameters()}
    versions = {name: p._version for name, p in wrapped.named_parameters()}
    assert take_weights(wrapped, other)
    assert {name: p.data_ptr() for name, p in wrapped.named_parameters()} == places
    for name, parameter in wrapped.named_parameters():  # packed weights are made anew where the version has changed
        assert (parameter._version > versions[name]) == ("lora_" not in name)
    torch.testing.assert_close(wrapped(token).logits, expected(token).logits)
    assert not torch.allclose(wrapped(token).logits, other(token).logits, atol=1e-2)


def test_what_heads_share_is_told_apart_from_the_rest() -> None:
    model, other = tiny("llama"), tiny("llama")
    assert not take_weights(model, other)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert not take_weights(model, other)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert take_weights(model, other)
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2)
    assert take_weights(model, other)


def test_another_architecture_is_refused_with_what_is_unlike() -> None:
    model = tiny("llama")
    check_alike(model, tiny("llama", seed=1))
    with pytest.raises(ValueError, match=r"cannot take the other model's weights: its .* is .*, there it is .*"):
        check_alike(model, tiny("qwen2"))
    deeper = tiny("llama")
    deeper.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(ValueError, match=r"rope_parameters.*same architecture"):
        check_alike(model, deeper)
    with pytest.raises(ValueError, match="the policies have other weights"):
        take_weights(model, tiny("qwen2"))
