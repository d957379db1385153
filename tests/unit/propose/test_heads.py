"""The heads and their proposals, on a tiny Llama."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specroll import noise
from specroll.config import HeadsConfig, HeadsSee
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.propose.readout import Readout, embed
from specroll.tree.grow import grow
from specroll.types import Draft, Draws, Features, SamplingParams, Verdict

VOCABULARY = torch.tensor([3, 5, 8, 13, 21, 34, 55, 60])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def features(model: LlamaForCausalLM, *, sequences: int = 3, temperature: float = 1.0, seed: int = 7) -> Features:
    generator = torch.Generator().manual_seed(1)
    return Features(
        hidden_SH=torch.randn(sequences, model.config.hidden_size, generator=generator),
        root_S=torch.randint(64, (sequences,), generator=generator),
        sample_S=torch.arange(sequences) + 100,
        position_S=torch.arange(sequences) + 10,
        sampling=SamplingParams(temperature=temperature, seed=seed),
    )


def best_path(model: LlamaForCausalLM, root_S: Tensor, draft: Draft) -> Tensor:
    """Embeddings of the root and of each horizon's best candidate but the last's, [S, K, H]."""
    return embed(model, torch.cat((root_S[:, None], draft.token_SKC[:, :-1, 0]), dim=1))


def wide_model() -> LlamaForCausalLM:
    """Wide enough that layers are packed where this CPU gains from it."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def moved(heads: FutureHeads) -> FutureHeads:
    """Heads that have left their zero start."""
    with torch.no_grad():
        heads.second_BHF.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
        heads.bias_KF.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
    return heads


@pytest.mark.parametrize("sees", ["path", "root", "state"])
def test_untrained_heads_equal_the_targets_own_state(model: LlamaForCausalLM, sees: HeadsSee) -> None:
    heads = FutureHeads.for_model(model, HeadsConfig(sees=sees))
    seen = features(model)
    draft = HeadsProposer(heads, model, ranking="probability").propose(seen)
    state_SKH = heads(seen.hidden_SH, best_path(model, seen.root_S, draft))
    assert state_SKH.shape == (3, 4, 32)
    torch.testing.assert_close(state_SKH, seen.hidden_SH[:, None].expand_as(state_SKH), rtol=0, atol=0)
    own_SV = model.lm_head(seen.hidden_SH)
    assert torch.equal(draft.token_SKC, own_SV.topk(16).indices[:, None].expand_as(draft.token_SKC))
    assert not heads.trained and moved(heads).trained


@pytest.mark.parametrize("sees", ["path", "root", "state"])
def test_each_step_follows_its_own_formula(model: LlamaForCausalLM, sees: HeadsSee) -> None:
    heads = moved(FutureHeads.for_model(model, HeadsConfig(sees=sees)))
    seen = features(model)
    path_SKH = embed(model, torch.randint(64, (3, 4), generator=torch.Generator().manual_seed(5)))

    def normed(x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    state_SKH = heads(seen.hidden_SH, path_SKH)
    assert heads.first_BFI.shape == ((1, 64, 64) if sees == "path" else (4, 64, 64 if sees == "root" else 32))
    for k in range(4):
        before = state_SKH[:, k - 1] if sees == "path" and k else seen.hidden_SH
        token = {"path": [path_SKH[:, k]], "root": [path_SKH[:, 0]], "state": []}[sees]
        block = 0 if sees == "path" else k
        inputs = torch.cat([normed(x) for x in (before, *token)], -1)
        inner = torch.nn.functional.silu(inputs @ heads.first_BFI[block].T + heads.bias_KF[k])
        torch.testing.assert_close(state_SKH[:, k], before + inner @ heads.second_BHF[block].T)


@pytest.mark.parametrize("ranking", ["noise", "probability"])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY.flip(0)])
@pytest.mark.parametrize("sees", ["path", "root", "state"])
def test_candidates_are_the_best_of_the_draft_vocabulary(
    model: LlamaForCausalLM, ranking: str, vocabulary: Tensor | None, sees: HeadsSee
) -> None:
    heads = moved(FutureHeads.for_model(model, HeadsConfig(sees=sees), vocabulary=vocabulary))
    seen = features(model)
    draft = HeadsProposer(heads, model, ranking=ranking, candidates=5).propose(seen)  # type: ignore[arg-type]
    score_SKV = model.lm_head(heads(seen.hidden_SH, best_path(model, seen.root_S, draft)))
    if ranking == "noise":
        for k in range(4):
            drawn_at_S = seen.position_S + k + 1  # the root sits at position_S
            score_SKV[:, k] += noise.gumbel_all(7, seen.sample_S, drawn_at_S, 64)
    if vocabulary is not None:
        outside_V = torch.ones(64, dtype=torch.bool)
        outside_V[vocabulary] = False
        score_SKV = score_SKV.masked_fill(outside_V, -torch.inf)
    expected = score_SKV.topk(5)
    assert torch.equal(draft.token_SKC, expected.indices)
    torch.testing.assert_close(draft.score_SKC, expected.values, rtol=1e-3, atol=1e-3)


def test_greedy_ignores_the_noise(model: LlamaForCausalLM) -> None:
    proposer = HeadsProposer(moved(FutureHeads.for_model(model)), model)
    drafts = [proposer.propose(features(model, temperature=0.0, seed=seed)) for seed in (1, 2)]
    assert torch.equal(drafts[0].token_SKC, drafts[1].token_SKC)


def test_the_draft_vocabulary_bounds_the_candidates(model: LlamaForCausalLM) -> None:
    proposer = HeadsProposer(FutureHeads.for_model(model, vocabulary=VOCABULARY), model, candidates=16)
    draft = proposer.propose(features(model))
    assert draft.token_SKC.shape == (3, 4, len(VOCABULARY))  # distinct, so no more than there are
    assert torch.equal(draft.token_SKC.sort(-1).values, VOCABULARY.expand(3, 4, -1))


def test_perfect_heads_with_the_noise_always_hit(model: LlamaForCausalLM) -> None:
    """Where the law at the next position is the heads' own q, the target's draw is the first candidate."""
    proposer = HeadsProposer(moved(FutureHeads.for_model(model)), model)
    seen = features(model, sequences=50)
    draft = proposer.propose(seen)
    state_SKH = proposer.heads(seen.hidden_SH, best_path(model, seen.root_S, draft))
    for k in range(4):
        noise_SV = noise.gumbel_all(7, seen.sample_S, seen.position_S + 1 + k, 64)
        drawn_S = (model.lm_head(state_SKH[:, k]).log_softmax(-1) + noise_SV).argmax(-1)
        assert (drawn_S == draft.token_SKC[:, k, 0]).float().mean() > 0.95  # packed weights may break near-ties


def test_weights_that_changed_are_seen_by_the_next_proposal() -> None:
    wide = wide_model().bfloat16()  # whose heads are prepared as copies: packed, or in bfloat16
    heads = FutureHeads.for_model(wide)
    proposer = HeadsProposer(heads, wide, ranking="probability")
    before = proposer.propose(features(wide))
    moved(heads)
    after = proposer.propose(features(wide))
    assert not torch.equal(before.token_SKC, after.token_SKC)


def test_refresh_takes_over_the_policys_lm_head_and_a_new_vocabulary(model: LlamaForCausalLM) -> None:
    proposer = HeadsProposer(
        FutureHeads.for_model(model, vocabulary=VOCABULARY), model, ranking="probability", candidates=1
    )
    seen = features(model)
    best_S = proposer.propose(seen).token_SKC[:, 0, 0]
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert torch.equal(proposer.propose(seen).token_SKC[:, 0, 0], best_S)  # its rows are a copy
    proposer.refresh()
    assert proposer.version == 1
    worst = model.lm_head(seen.hidden_SH)[:, VOCABULARY].argmax(-1)
    assert torch.equal(proposer.propose(seen).token_SKC[:, 0, 0], VOCABULARY[worst])
    proposer.heads.use_vocabulary(torch.tensor([2]))
    proposer.refresh()
    assert proposer.propose(seen).token_SKC.unique().tolist() == [2]
    with torch.no_grad():
        model.lm_head.weight.neg_()


def test_scale_and_soft_cap_of_the_model_are_applied() -> None:
    logits = torch.tensor([-8.0, 0.0, 4.0])
    row_VH = torch.zeros(3, 1)
    capped = Readout(row_VH, None, scale=0.5, softcap=2.0).finish(logits)
    torch.testing.assert_close(capped, 2.0 * torch.tanh(logits * 0.5 / 2.0))
    torch.testing.assert_close(Readout(row_VH, None, scale=1.0, softcap=None).finish(logits), logits)


def test_observe_teaches_the_calibrator(model: LlamaForCausalLM) -> None:
    proposer = HeadsProposer(moved(FutureHeads.for_model(model)), model)
    draft = proposer.propose(features(model))
    tree = grow(draft, torch.zeros(3, dtype=torch.int64), 2)
    missed_N = torch.full_like(tree.token_N, -1)
    zeros_N = torch.zeros(tree.token_N.numel())
    before = proposer.calibrator.coverage_PK[0].clone()
    proposer.observe(draft, tree, Verdict(Draws(missed_N, zeros_N, zeros_N, zeros_N), tree.depth_N == 0))
    after = proposer.calibrator.coverage_PK[0]
    assert after[0] < before[0] and torch.equal(after[1:], before[1:])


def test_a_settled_calibration_learns_from_some_of_the_rounds(model: LlamaForCausalLM) -> None:
    proposer = HeadsProposer(moved(FutureHeads.for_model(model)), model)
    draft = proposer.propose(features(model))
    tree = grow(draft, torch.zeros(3, dtype=torch.int64), 0)
    zeros_N = torch.zeros(3)
    verdict = Verdict(Draws(torch.full((3,), -1), zeros_N, zeros_N, zeros_N), torch.ones(3, dtype=torch.bool))

    def learned(rounds: int) -> int:
        changes = 0
        for _ in range(rounds):
            before = proposer.calibrator.covered_PK
            proposer.observe(draft, tree, verdict)
            changes += proposer.calibrator.covered_PK is not before
        return changes

    assert learned(256) == 256 and learned(40) == 10
    proposer.refresh()
    assert learned(64) == 64


def test_a_refresh_keeps_what_was_observed_unless_the_heads_were_fitted_anew(model: LlamaForCausalLM) -> None:
    heads = moved(FutureHeads.for_model(model))
    heads.calibration_2PK = torch.tensor([0.6, 1.0]).view(2, 1, 1).repeat(1, 2, heads.horizons)
    proposer = HeadsProposer(heads, model)
    proposer.calibrator.covered_PK = proposer.calibrator.covered_PK * 0.5
    proposer.refresh()
    torch.testing.assert_close(proposer.calibrator.coverage_PK, torch.full((2, heads.horizons), 0.3))
    heads.calibration_2PK = torch.tensor([0.7, 2.0]).view(2, 1, 1).repeat(1, 2, heads.horizons)
    proposer.refresh()
    torch.testing.assert_close(proposer.calibrator.estimate_2PK, heads.calibration_2PK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_proposals_of_other_precisions_agree(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    heads = moved(FutureHeads.for_model(model))
    exact = HeadsProposer(heads, model, ranking="probability").propose(features(model))
    cast = LlamaForCausalLM(model.config)
    cast.to(dtype=dtype)  # type: ignore[call-arg]
    cast.load_state_dict(model.state_dict())
    draft = HeadsProposer(heads, cast, ranking="probability").propose(features(model))
    assert (draft.token_SKC[..., 0] == exact.token_SKC[..., 0]).float().mean() > 0.9
    assert draft.score_SKC.dtype == torch.float32


def test_packed_weights_propose_what_the_heads_say() -> None:
    wide = wide_model()
    heads = FutureHeads.for_model(wide)
    with torch.no_grad():
        heads.second_BHF.normal_(0, 0.1)
    seen = features(wide)
    draft = HeadsProposer(heads, wide, ranking="probability").propose(seen)
    score_SKV = wide.lm_head(heads(seen.hidden_SH, best_path(wide, seen.root_S, draft)))
    torch.testing.assert_close(draft.score_SKC, score_SKV.gather(-1, draft.token_SKC), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(draft.score_SKC, score_SKV.topk(16).values, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("tokens", [[], [-1, 3], [64]])
def test_a_vocabulary_of_another_tokenizer_is_refused(model: LlamaForCausalLM, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="draft vocabulary"):
        FutureHeads.for_model(model, vocabulary=torch.tensor(tokens, dtype=torch.int64))


def test_bad_options_are_refused(model: LlamaForCausalLM) -> None:
    heads = FutureHeads.for_model(model)
    with pytest.raises(ValueError, match="ranking"):
        HeadsProposer(heads, model, ranking="luck")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="candidate"):
        HeadsProposer(heads, model, candidates=0)
    with pytest.raises(ValueError, match="horizon"):
        FutureHeads(8, 8, HeadsConfig(horizons=0))
    with pytest.raises(ValueError, match="fit heads to this model"):
        HeadsProposer(FutureHeads(8, 8), model)


@pytest.mark.parametrize("sees", ["path", "root", "state"])
@pytest.mark.parametrize("vocabulary", [None, torch.tensor([9, 11, 13, 15, 40])])
def test_a_text_that_repeats_is_continued(model: LlamaForCausalLM, sees: HeadsSee, vocabulary: Tensor | None) -> None:
    """Reflex along the drafted path: each horizon's candidate follows from the one before it."""
    heads = FutureHeads.for_model(model, HeadsConfig(sees=sees), vocabulary=vocabulary)
    text = torch.tensor([[9, 11, 13, 15, 40] * 8 + [9, 11]])
    seen = replace(
        features(model, sequences=1),
        root_S=text[:, -1],
        position_S=torch.tensor([text.shape[1] - 1]),
        past_SL=torch.nn.functional.pad(text, (0, 3), value=7),
    )
    draft = HeadsProposer(heads, model, ranking="probability").propose(seen)
    assert draft.token_SKC[0, :, 0].tolist() == [13, 15, 40, 9]
    lean = HeadsProposer(heads, model, ranking="probability", reflex="off").propose(seen)
    assert lean.token_SKC[0, :, 0].tolist() != [13, 15, 40, 9]
