"""From names and prompts to objects: what is taken, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specroll.build import build_engine, encode, make_requests
from specroll.config import BudgetConfig, EngineConfig, TrainConfig
from specroll.types import SamplingParams
from tiny import tiny, tiny_tokenizer


def test_a_text_and_its_messages_are_the_same_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (text,), (messages,) = encode(tokenizer, ["ab"]), encode(tokenizer, [[{"role": "user", "content": "ab"}]])
    assert text == messages


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("name a sea", "give a list"),
        ([5], "prompt 1 is 5"),
        (["ok", []], "prompt 2 is \\[\\]"),
        ([[{"role": 5, "content": None}]], "a message is"),
        ([["hello"]], "a message is"),
        (["ok", "\udcff bad"], "prompt 2 is not valid UTF-8"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_requests(tiny_tokenizer(), prompts)


def test_a_model_may_be_named_by_its_path(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = build_engine(tmp_path, dtype="float32")
    assert engine.generate(make_requests(engine.tokenizer, ["a"], max_new_tokens=2), SamplingParams()).tokens == 2


def test_what_is_no_request_is_named() -> None:
    requests: Any = ["hi"]
    with pytest.raises(ValueError, match="make_requests"):
        build_engine(tiny("llama"), tiny_tokenizer()).generate(requests, SamplingParams())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EngineConfig(max_running=0), "max_running must be a whole number of at least 1"),
        (lambda: BudgetConfig(max_nodes=-1), "max_nodes must be"),
        (lambda: BudgetConfig(fixed_nodes=-1), "fixed_nodes must be"),
        (lambda: SamplingParams(top_k=1.5), "top_k must be a whole number"),  # type: ignore[arg-type]
        (lambda: SamplingParams(seed=1 << 64), "seed must be a whole number of 64 bits"),
        (lambda: TrainConfig(learning_rate=float("nan")), "learning_rate must be"),
        (lambda: TrainConfig(beta=-1.0), "beta must be"),
        (lambda: TrainConfig(top_p=5.0), "top_p must be"),
        (lambda: TrainConfig(budget="best"), "rule is one of optimal, paper"),  # type: ignore[arg-type]
        (lambda: TrainConfig(seed=-1), "seed must be"),
        (lambda: TrainConfig(demo=True, task="mine.jsonl"), "held-out"),
        (lambda: TrainConfig(steps="x"), "steps must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range_are_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
