"""The drafter's network is one layer of the installed architecture, and says the same however its rows are packed."""

from __future__ import annotations

import pytest
import torch
from drafted import SAMPLING, drafter_of, from_scratch, plain, seen_by

from specroll.model.attention import PromptPass
from specroll.propose.readout import embed
from specroll.rivals.eagle import Drafter
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny

TOKENS = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))  # longer than the sliding windows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_one_layer_of_the_models_kind_without_an_embedding(architecture: str) -> None:
    model = tiny(architecture)
    decoder = model.get_decoder()
    drafter = Drafter.for_model(model)
    assert type(drafter.body) is type(decoder)
    (layer,) = drafter.body.layers
    assert type(layer) is type(decoder.layers[0])
    names = dict(drafter.named_parameters())
    assert not [name for name in names if "embed" in name or "lm_head" in name]
    assert torch.equal(names["body.norm.weight"], decoder.norm.weight)
    assert all(p.dtype == torch.float32 for p in names.values())
    assert model.config.num_hidden_layers > 1 and model.config.vocab_size == VOCAB_SIZE  # the model's is left alone


def test_the_seed_decides_the_weights_and_leaves_the_worlds_alone() -> None:
    model = tiny("llama")
    torch.manual_seed(5)
    one = Drafter.for_model(model, seed=1)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    same, other = Drafter.for_model(model, seed=1), Drafter.for_model(model, seed=2)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
    assert not torch.equal(one.fuse.weight, other.fuse.weight)
    layer = "body.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(one.state_dict()[layer], other.state_dict()[layer])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_it_foretells_depends_on_all_that_came_before_and_on_nothing_else(architecture: str) -> None:
    model = plain(architecture)[0]
    drafter = drafter_of(architecture, taught=True)
    hidden_TH, token_T = seen_by(model, TOKENS.tolist()), TOKENS.roll(-1)
    state_TH, _ = from_scratch(drafter, model, hidden_TH, token_T)
    for end in (1, 9, 30):  # nothing of what comes after
        early_TH, _ = from_scratch(drafter, model, hidden_TH[:end], token_T[:end])
        torch.testing.assert_close(early_TH, state_TH[:end], rtol=1e-4, atol=1e-5)
    changed_TH = hidden_TH.clone()
    changed_TH[0] += 1.0  # and the very first, also beyond the width of a sliding window
    assert (from_scratch(drafter, model, changed_TH, token_T)[0][-1] - state_TH[-1]).abs().max() > 1e-6
    with torch.no_grad():  # two texts in a row do not see each other
        twice_NH = drafter(
            hidden_TH.repeat(2, 1), embed(model, token_T.repeat(2)), torch.arange(30).repeat(2), PromptPass([30, 30])
        )
    torch.testing.assert_close(twice_NH, state_TH.repeat(2, 1), rtol=1e-4, atol=1e-5)


def test_the_token_that_was_drawn_matters() -> None:
    model = plain("llama")[0]
    drafter = drafter_of("llama", taught=False)
    hidden_TH = seen_by(model, TOKENS.tolist())
    one, other = (from_scratch(drafter, model, hidden_TH[:5], t)[0][-1] for t in (TOKENS[:5], TOKENS[:5] + 1))
    assert (one - other).abs().max() > 1e-3
    assert SAMPLING.temperature == 1.0
