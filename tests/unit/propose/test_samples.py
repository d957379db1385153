"""Trajectories laid end to end, their laws over a draft vocabulary, and a judge whose right answers are known."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specroll.config import HeadsConfig
from specroll.propose.heads import FutureHeads
from specroll.propose.judge import Judge
from specroll.propose.samples import Samples, draft_vocabulary, split
from specroll.types import Trajectory


def trajectory(tokens: list[int], laws: list[dict[int, float]], hidden: torch.Tensor | None = None) -> Trajectory:
    width = max(len(law) for law in laws)
    token_TC = torch.tensor([[*law, *[0] * (width - len(law))] for law in laws])
    logp_TC = torch.tensor([[*law.values(), *[0.0] * (width - len(law))] for law in laws]).log()
    hidden = torch.zeros(len(tokens), 4) if hidden is None else hidden
    return Trajectory(hidden, torch.tensor(tokens), token_TC, logp_TC)


SHORT = trajectory([7], [{7: 1.0}])
LONG = trajectory([3, 9, 5], [{3: 0.5, 4: 0.5}, {9: 0.6, 2: 0.3, 8: 0.01}, {5: 1.0}])


def test_positions_know_what_follows_them() -> None:
    samples = Samples.of([SHORT, LONG])
    assert samples.left_P.tolist() == [0, 2, 1, 0]
    assert samples.starts().tolist() == [1, 2]
    ahead_BK, exists_BK = samples.ahead(samples.starts(), 2)
    assert samples.token_P[ahead_BK[0]].tolist() == [9, 5] and int(samples.token_P[ahead_BK[1, 0]]) == 5
    assert exists_BK.tolist() == [[True, True], [True, False]]


def test_laws_are_cut_to_the_draft_vocabulary_and_renormalised() -> None:
    samples = Samples.of([SHORT, LONG])
    law = samples.law(torch.tensor([1, 2, 0]), torch.tensor([2, 3, 9]))
    dense = torch.zeros(3, 3).scatter_add_(1, law.slot_NC, law.probability_NC)
    torch.testing.assert_close(dense, torch.tensor([[0.0, 1.0, 0.0], [1 / 3, 0.0, 2 / 3], [0.0, 0.0, 0.0]]))
    full = samples.law(torch.tensor([1]), None)
    assert full.slot_NC[0, :2].tolist() == [3, 4] and full.probability_NC[0].tolist() == [0.5, 0.5, 0.0]


def test_the_draft_vocabulary_holds_what_is_expected_often_enough() -> None:
    some = trajectory([1, 2], [{1: 0.4, 2: 0.2, 3: 0.4}, {2: 0.2, 4: 0.8}])
    assert draft_vocabulary([some]).tolist() == [1, 2, 3, 4]
    other = trajectory([5], [{5: 0.9, 6: 0.1}])
    assert draft_vocabulary([some, other]).tolist() == [1, 2, 3, 4, 5]  # drawn or not
    assert draft_vocabulary([other] * 4).tolist() == [5, 6]
    flat = trajectory([7], [dict.fromkeys((7, 8, 9, 10, 11), 0.2)])
    assert draft_vocabulary([flat]).tolist() == [7, 8, 9, 10, 11]  # as good as any, and none would be too few
    silent = Trajectory(torch.zeros(0, 4), torch.tensor([]), torch.zeros(0, 2).long(), torch.zeros(0, 2))
    for nothing in ([], [silent]):
        with pytest.raises(ValueError, match="at least one"):
            draft_vocabulary(nothing)


def test_whole_trajectories_are_held_out() -> None:
    trajectories = [trajectory([i, i], [{i: 1.0}, {i: 1.0}]) for i in range(20)]

    def firsts(held_out: float, seed: int) -> tuple[list[int], list[int]]:
        learn, judges = split(trajectories, held_out, seed)
        return [int(t.token_T[0]) for t in learn], [int(t.token_T[0]) for t in judges]

    learn, judges = firsts(0.25, 3)
    assert len(judges) == 5 and sorted(learn + judges) == list(range(20))
    assert firsts(0.25, 3) == (learn, judges)
    assert firsts(0.25, 4)[1] != judges
    assert firsts(0.0, 0) == (list(range(20)), [])
    assert split(trajectories[:1], 0.5, seed=0)[1] == []  # the only one is learned from


def test_the_judge_sees_perfect_heads_as_perfect() -> None:
    """lm_head is the identity and h the log of the next law, so untrained heads are perfect at horizon 1.

    Ranked with the noise that made the draws, the first candidate is always right; by probability it is right as often
    as the law says. Other heads are worse by the KL between the laws.
    """
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(8))
    length = 4000
    logp_TV = (torch.randn(length, 8) * 1.5).log_softmax(-1)
    token_T = torch.multinomial(logp_TV.exp(), 1).squeeze(1)
    made = Trajectory(logp_TV.roll(-1, 0), token_T, torch.arange(8).expand(length, 8), logp_TV)
    heads = FutureHeads.for_model(model, HeadsConfig(horizons=1))
    judge = Judge(model, [made], reflex="off")
    assert abs(float(judge.kl(heads))) < 1e-5
    assert judge.acceptance(heads, (1,))[1] > 0.995  # the horizon of the last position is the end
    by_probability = judge.acceptance(heads, (1, 3), ranking="probability")
    top_T3 = logp_TV.exp().topk(3).values
    assert by_probability[1] == pytest.approx(float(top_T3[:, 0].mean()), abs=0.03)
    assert by_probability[3] == pytest.approx(float(top_T3.sum(1).mean()), abs=0.03)
    blind = Trajectory(torch.zeros(length, 8), *(getattr(made, n) for n in ("token_T", "top_token_TC", "top_logp_TC")))
    uniform = Judge(model, [blind])
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    assert float(uniform.kl(heads)) == pytest.approx(float(torch.tensor(8.0).log() - entropy_T.mean()), abs=0.03)
