"""The proof on the real default model, in float32: speculation on = off = transformers' greedy search with noise."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specroll.build import build_engine, make_requests
from specroll.check import check
from specroll.hf import specroll_generate
from specroll.propose.heads import FutureHeads
from specroll.types import SamplingParams

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
PROMPTS = ["What is 7+5?", "Write one short sentence about the sea."]


def heads_of(kind: str, model: PreTrainedModel) -> FutureHeads | None:
    if kind == "spoilt replay":
        return None
    heads = FutureHeads.for_model(model)
    with torch.no_grad():
        heads.second_BHF.normal_(generator=torch.Generator().manual_seed(0), std=0.02)
    return heads


@pytest.mark.parametrize("kind", ["heads", "spoilt replay"])
def test_speculation_changes_no_token(real_model: Loaded, kind: str) -> None:
    model, tokenizer = real_model
    engine = build_engine(model, tokenizer, heads=heads_of(kind, model), fixed_nodes=4)
    requests = make_requests(tokenizer, PROMPTS, samples=2, max_new_tokens=12)
    report = check(engine, requests, SamplingParams(top_p=0.95, seed=11))
    assert report.exact, report.differences
    assert report.proposer == kind and report.nodes == 4 and report.plain.tokens > 20
    assert report.max_dlogp_trainer < 1e-3
    if kind == "spoilt replay":
        assert report.tokens_per_round > 1.3


def test_transformers_own_door(real_model: Loaded) -> None:
    model, tokenizer = real_model
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 10, "do_sample": False}
    ours = model.generate(**inputs, **options, custom_generate=specroll_generate)  # type: ignore[operator]
    assert torch.equal(ours, model.generate(**inputs, **options))  # type: ignore[operator]
