"""`model.generate(custom_generate=specroll_generate)`: the same answers as transformers' own loop where both are
deterministic, the engine's samples elsewhere, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StopStringCriteria
from transformers.generation import LogitsProcessor

from specroll.build import build_engine
from specroll.hf import specroll_generate
from specroll.propose.heads import FutureHeads
from specroll.propose.store import save_heads
from specroll.types import Request, SamplingParams
from tiny import EOS, PAD, tiny, tiny_tokenizer

PROMPTS = ((5, 6, 7, 8, 9), (30, 31), (5, 6, 7, 8, 9), (11, 12, 13, 14))
WIDTH = max(map(len, PROMPTS))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama")


def inputs() -> dict[str, Any]:
    ids = torch.tensor([[PAD] * (WIDTH - len(p)) + list(p) for p in PROMPTS])
    mask = torch.tensor([[0] * (WIDTH - len(p)) + [1] * len(p) for p in PROMPTS])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, **options: Any) -> Any:
    return model.generate(**{**inputs(), "max_new_tokens": 20, "custom_generate": specroll_generate, **options})


def engine_rows(model: PreTrainedModel, sampling: SamplingParams, limit: int = 20) -> list[list[int]]:
    requests = [Request(prompt_ids=p, sample=i, max_new_tokens=limit) for i, p in enumerate(PROMPTS)]
    return [c.token_ids for c in build_engine(model).generate(requests, sampling).completions]


def answers(sequences: torch.Tensor, width: int = WIDTH) -> list[list[int]]:
    """New tokens of each row, without the padding behind EOS."""
    rows = [row[width:] for row in sequences.tolist()]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def test_greedy_is_transformers_own_greedy(model: Any) -> None:
    ours = generate(model, do_sample=False)
    theirs = model.generate(**inputs(), max_new_tokens=20, do_sample=False)
    assert torch.equal(ours, theirs)


def test_padding_and_grouping_change_nothing(model: PreTrainedModel) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=5)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 5}
    sequences = generate(model, **options)
    assert answers(sequences) == engine_rows(model, sampling)
    assert torch.equal(sequences[:, :WIDTH], inputs()["input_ids"])
    for row, new in zip(sequences.tolist(), answers(sequences), strict=True):
        assert set(row[WIDTH + len(new) :]) <= {PAD}
    assert answers(sequences)[0] != answers(sequences)[2]  # equal prompts have their own noise


def test_heads_change_nothing_but_speed(model: PreTrainedModel, tmp_path: Any) -> None:
    heads = FutureHeads.for_model(model)
    with torch.no_grad():
        heads.second_BHF.normal_(generator=torch.Generator().manual_seed(0), std=0.2)
    folder = save_heads(heads, tmp_path / "heads", model)
    engine = build_engine(model, heads=folder, fixed_nodes=5)
    plain = generate(model, do_sample=True, top_k=0, seed=3)
    assert torch.equal(plain, generate(model, do_sample=True, top_k=0, seed=3, heads=folder))
    assert torch.equal(plain, generate(model, do_sample=True, top_k=0, seed=3, engine=engine))
    with pytest.raises(ValueError, match="either engine or heads"):
        generate(model, engine=engine, heads=folder)
    with pytest.raises(ValueError, match="another model"):
        generate(tiny("llama", seed=1), engine=engine)


def test_the_engine_keeps_its_own_eos_ids(model: PreTrainedModel) -> None:
    engine = build_engine(model)
    free = generate(model, do_sample=False, engine=engine, eos_token_id=None, max_new_tokens=6)
    first = int(free[0, WIDTH])
    ended = generate(model, do_sample=False, engine=engine, eos_token_id=[first, EOS], max_new_tokens=6)
    assert ended[0, WIDTH:].tolist() == [first] + [PAD] * (ended.shape[1] - WIDTH - 1)
    assert engine.eos_ids == {EOS}


def test_several_sequences_and_the_output_class(model: Any) -> None:
    output = generate(model, do_sample=True, num_return_sequences=3, seed=1, return_dict_in_generate=True)
    rows = answers(output.sequences)
    assert len(rows) == 3 * len(PROMPTS) and len({tuple(row) for row in rows[:3]}) == 3


def test_torchs_seed_decides_if_none_is_given(model: Any) -> None:
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return generate(model, do_sample=True)

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


def test_max_length_counts_the_padding_as_generate_does(model: Any) -> None:
    ours = generate(model, do_sample=False, max_new_tokens=None, max_length=9)
    assert torch.equal(ours, model.generate(**inputs(), do_sample=False, max_length=9))


def test_without_a_mask_pads_are_guessed_as_generate_does(model: Any) -> None:
    ids = inputs()["input_ids"]
    ours = model.generate(ids, do_sample=False, max_new_tokens=8, custom_generate=specroll_generate)
    assert torch.equal(ours, model.generate(ids, do_sample=False, max_new_tokens=8))


def test_stop_strings_end_a_sequence(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    engine = build_engine(model, tokenizer)
    free = [tokenizer.decode(row) for row in answers(generate(model, do_sample=True, seed=2))]
    stop = free[0][3:5]
    ended = generate(model, do_sample=True, seed=2, engine=engine, stop_strings=stop)
    again = generate(
        model, do_sample=True, seed=2, engine=engine, stopping_criteria=[StopStringCriteria(tokenizer, [stop])]
    )
    assert torch.equal(ended, again)
    text = tokenizer.decode(ended[0, WIDTH:].tolist(), skip_special_tokens=True)
    assert text == free[0][: free[0].index(stop) + 2]
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(model, stop_strings=stop)


class Mine(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class Whim(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.ones(len(PROMPTS), 2, 1, 8), torch.ones(len(PROMPTS), 2, 1, 8), 0)
    return cache


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"repetition_penalty": 1.3}, "repetition_penalty"),
        ({"logits_processor": [Mine()]}, "logits processor Mine"),
        ({"stopping_criteria": [Whim()]}, "stopping criterion Whim"),
        ({"max_time": 3.0}, "stopping criterion MaxTimeCriteria"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(WIDTH).expand(len(PROMPTS), -1) + 3}, "position_ids"),
        ({"attention_mask": inputs()["attention_mask"].flip(-1)}, "padded on the left"),
        ({"num_beams": 2}, "num_beams"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*right-padding")
def test_what_cannot_be_exact_is_refused_by_name(model: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        generate(model, **options)


def test_other_inputs_are_refused(model: Any) -> None:
    embeds = model.get_input_embeddings()(inputs()["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds is not supported"):
        generate(model, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="a filled"):
        generate(model, cache=filled_cache())
