"""Proposers by name, and the example of one's own: what it proposes is drawn, and no token changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specroll.build import build_engine, make_requests
from specroll.config import is_import_path, proposer_names
from specroll.propose import catalog
from specroll.types import Features, SamplingParams
from tiny import EOS, VOCAB_SIZE, tiny, tiny_heads, tiny_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
PHRASE = "fish, "  # no letter twice: each tells the next one
EXAMPLE = "phrase_proposer:PhraseList"

pytestmark = pytest.mark.usefixtures("known_curve")


@pytest.fixture
def phrase_list(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's class, with a phrase that the model below likes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    kind = catalog.import_module("phrase_proposer").PhraseList
    monkeypatch.setattr(kind, "phrases", (PHRASE, "another one"))
    return kind


def repeating() -> LlamaForCausalLM:
    """Says PHRASE again and again, with a slip now and then: its layers do nothing, and lm_head knows what follows."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = tiny_tokenizer()(PHRASE, add_special_tokens=False)["input_ids"]
    after = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding_VH = torch.eye(VOCAB_SIZE, 64)
        model.model.embed_tokens.weight.copy_(embedding_VH)
        model.lm_head.weight.zero_()
        for token in range(3, VOCAB_SIZE):  # from any letter back to the phrase
            model.lm_head.weight[after.get(token, ids[0])] += 0.8 * embedding_VH[token]
    return model


def generated(engine: Any, prompts: list[str]) -> Any:
    requests = make_requests(engine.tokenizer, prompts, samples=2, max_new_tokens=40, chat=False)
    return engine.generate(requests, SamplingParams(seed=3))


@pytest.mark.parametrize("fixed_nodes", [4, None])
def test_a_phrase_that_is_known_is_proposed_and_drawn(phrase_list: Any, fixed_nodes: int | None) -> None:
    model, tokenizer = repeating(), tiny_tokenizer()
    plain = generated(build_engine(model, tokenizer), ["go: f", "other"])
    engine = build_engine(model, tokenizer, proposers=EXAMPLE, fixed_nodes=fixed_nodes)
    assert isinstance(engine.proposer, phrase_list) and engine.proposer.name == "PhraseList"
    rollout = generated(engine, ["go: f", "other"])
    assert [c.token_ids for c in rollout.completions] == [c.token_ids for c in plain.completions]
    assert rollout.completions[0].text.count(PHRASE) >= 2
    assert rollout.faults == 0 and sum(sum(r.accepted_by_depth) for r in rollout.rounds) > 10
    if fixed_nodes:
        assert rollout.tokens_per_round > 1.5
        assert 0.5 < float(engine.proposer._right / engine.proposer._tried) < 1, "it has learned how likely it is"


def test_what_the_example_proposes_is_the_rest_of_the_longest_beginning(phrase_list: Any) -> None:
    tokenizer = tiny_tokenizer()
    proposer = phrase_list(tiny("llama"), tokenizer)
    texts = ["xxfi", "fish,", "ii another o", "nothing", "f"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    length = max(map(len, ids))
    past_SL = torch.tensor([row + [7] * (length - len(row)) for row in ids])  # what is behind a root means nothing
    position_S = torch.tensor([len(row) - 1 for row in ids])
    root_S = past_SL.gather(1, position_S[:, None])[:, 0]
    draft = proposer.propose(
        Features(torch.zeros(5, 32), root_S, torch.arange(5), position_S, SamplingParams(), past_SL)
    )
    rests = []
    for token_KC, hit_KC in zip(draft.token_SKC, draft.hit_SKC, strict=True):
        rests.append(tokenizer.decode(token_KC[hit_KC > 0]))
    assert rests == ["sh, ", " ", "ne", "", "ish, "]
    assert not draft.hit_SKC[3].any()


def test_names_are_read_and_mistakes_told() -> None:
    assert proposer_names("heads, a.b_c:D") == ("heads", "a.b_c:D")
    for wrong in ("", "head", "heads,", "a:b:c", "a.b", ":X", "1a:B", "a-b:C", "a/b:C"):
        with pytest.raises(ValueError, match="or your own class as module:Class"):
            proposer_names(wrong)
    with pytest.raises(ValueError, match="names one twice"):
        proposer_names("heads,heads")
    assert not is_import_path("suffix") and is_import_path("a:B")


MODULE = """
class Fine:
    def __init__(self, model, tokenizer): self.given = model, tokenizer
    def propose(self, features): ...
    def observe(self, draft, tree, verdict, out=None): ...
class Mute(Fine):
    propose = None
class Needy(Fine):
    def __init__(self, model, tokenizer, more): ...
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_proposers.py").write_text(MODULE)
    (tmp_path / "broken_proposers.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_proposers", raising=False)
    return "own_proposers"


def test_a_class_of_ones_own_gets_model_and_tokenizer(own_module: str) -> None:
    made: Any = catalog.find(f"{own_module}:Fine")("model", "tokenizer")  # type: ignore[arg-type]
    assert made.given == ("model", "tokenizer") and made.name == "Fine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:X", "no module 'no_such_module' for the proposer no_such_module:X: run from the folder"),
        ("own_proposers.sub:X", "no module 'own_proposers.sub'"),
        ("own_proposers:Nobody", "has no class Nobody"),
        ("own_proposers:number", "has no class number"),
        ("own_proposers:Needy", r"could not be made as Needy\(model, tokenizer\): .*more"),
        ("own_proposers:Mute", "Mute is no proposer: it has no method propose"),
        ("nobody", "no proposer is named 'nobody'"),
    ],
)
def test_what_is_no_proposer_is_told(own_module: str, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        catalog.find(name)(tiny("llama"), None)


def test_what_a_module_itself_lacks_is_its_own_error(own_module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        catalog.find("broken_proposers:X")


def test_heads_and_their_name_belong_together(own_module: str) -> None:
    model, tokenizer, heads = tiny("llama"), tiny_tokenizer(), tiny_heads()
    for settings in ({"heads": heads, "proposers": f"{own_module}:Fine"}, {"proposers": "heads"}):
        with pytest.raises(ValueError, match="named among the proposers and given as heads"):
            build_engine(model, tokenizer, **settings)
    assert build_engine(model, tokenizer, heads=heads, proposers="heads").proposer.name == "heads"  # type: ignore[union-attr]
    assert build_engine(model, tokenizer).proposer is None
