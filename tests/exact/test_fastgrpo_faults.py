"""What is known to be wrong in public code for FastGRPO, and that none of it is so here: one test for each fault.

Each runs the method itself. Where a fault is the engine's or the trainer's to have, `ELSEWHERE` names the tests that
look into it more closely, with planted bugs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafted import SAMPLING, drafter_of, plain, requests, tokens_of

from specroll.config import EngineConfig
from specroll.engine import Engine, Rollout
from specroll.rivals.fastgrpo import FastGRPO
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Request
from tiny import VOCAB_SIZE, tiny_tokenizer

ELSEWHERE = {
    "first token shared by the whole group": [
        "exact/test_engine.py::test_members_of_a_group_are_independent",
        "exact/test_walk_law.py::test_the_checker_sees_a_planted_bug",
    ],
    "rewards attached to the wrong response after sorting": [
        "unit/train/test_trainer.py::test_rewards_and_advantages_belong_to_their_responses",
        "unit/train/test_rollout.py::test_order_is_kept_whatever_runs_together",
    ],
    "all rows cut when the longest reaches the limit": [
        "exact/test_engine.py::TestEndings.test_each_row_stops_at_its_own_limit",
        "exact/test_engine.py::TestEndings.test_planted_bugs_are_noticed",
    ],
    "training on re-tokenised text": [
        "exact/test_trainer_logps.py::test_every_architecture",
        "unit/train/test_trainer.py::test_rewards_and_advantages_belong_to_their_responses",
    ],
    "a crash where more sequences run than the capacity": [
        "unit/rivals/test_rule.py::test_shapes_by_hand",
        "exact/test_fastgrpo.py::test_more_sequences_than_capacity_decode_plainly",
    ],
    "keys and values with holes": [
        "unit/rivals/test_context.py::test_slots_hold_what_one_pass_over_all_would_leave",
        "unit/rivals/test_context.py::test_planted_bugs_are_noticed",
        "parity/test_target.py::test_a_kept_path_is_the_recomputed_prefix",
    ],
    "a mismatching draw thrown away and drawn again": [
        "exact/test_walk_law.py::test_emits_the_targets_law",
        "exact/test_walk_law.py::test_the_checker_sees_a_planted_bug",
    ],
}


@pytest.mark.parametrize("test", sorted({test for tests in ELSEWHERE.values() for test in tests}))
def test_what_looks_closer_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    source = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    for part in name.split("."):
        assert f"def {part}(" in source or f"class {part}" in source


def fastgrpo(wanted: list[Request], *, capacity: int = 60, slots: int = 64) -> tuple[Rollout, FastGRPO]:
    model = plain("llama")[0]
    rival = FastGRPO.for_model(model, drafter_of("llama", taught=True), FastGRPOConfig(capacity=capacity))
    engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[], config=EngineConfig(max_running=slots))
    return engine.generate(wanted, SAMPLING), rival


def test_each_member_of_a_group_draws_its_own_first_token() -> None:
    group = [Request(prompt_ids=(3, 4, 5), sample=i, max_new_tokens=2) for i in range(400)]
    rollout, _ = fastgrpo(group, capacity=800)
    with torch.no_grad():
        law_V = plain("llama")[0](torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1)
    firsts = torch.tensor([c.token_ids[0] for c in rollout.completions])
    seen_V = torch.bincount(firsts, minlength=VOCAB_SIZE) / len(group)
    kept_V = law_V * (seen_V > 0)  # top_p leaves the unlikeliest out
    assert 0.5 * (seen_V - kept_V / kept_V.sum()).abs().sum() < 0.12
    assert (firsts[1:] == firsts[:-1]).float().mean() < 0.8
    assert any(r.proposed for r in rollout.rounds)


def test_a_response_stays_with_its_request() -> None:
    """The shortest ends first and the longest is not the last: nothing is sorted, or not taken back."""
    wanted = [
        Request(prompt_ids=(3 + i, 4), sample=i, max_new_tokens=tokens) for i, tokens in enumerate((9, 30, 4, 17, 2))
    ]
    rollout, _ = fastgrpo(wanted, slots=2)
    for request, completion in zip(wanted, rollout.completions, strict=True):
        (alone,) = Engine(plain("llama")[0], eos_ids=[]).generate([request], SAMPLING).completions
        assert (completion.sample, completion.token_ids) == (request.sample, alone.token_ids)


def test_no_response_is_cut_by_another_and_none_overshoots() -> None:
    wanted = [
        Request(prompt_ids=tuple(range(3, 3 + prompt)), sample=i, max_new_tokens=tokens)
        for i, (prompt, tokens) in enumerate(((40, 3), (2, 31), (1, 17), (2, 31)))
    ]
    rollout, _ = fastgrpo(wanted)
    assert rollout.tokens_per_round > 1
    assert [len(c.token_ids) for c in rollout.completions] == [3, 31, 17, 31]


def test_the_drafter_learns_the_ids_that_were_drawn() -> None:
    """Not those of their text, which are others here: what the tokenizer does not know is lost in it."""
    rollout, rival = fastgrpo(requests())
    tokenizer = tiny_tokenizer()
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in rollout.completions]
    again = [tokenizer(text)["input_ids"] for text in texts]
    assert any(ids != c.token_ids for ids, c in zip(again, rollout.completions, strict=True))
    drawn = sorted([*r.prompt_ids, *c.token_ids] for r, c in zip(requests(), rollout.completions, strict=True))
    assert sorted(p.token_T.tolist() for p in rival.proposer.take()) == sorted(text[1:] for text in drawn)


def test_more_sequences_than_capacity_are_no_crash() -> None:
    rollout, rival = fastgrpo(requests(), capacity=3)
    assert tokens_of(rollout) == tokens_of(plain("llama")[1])
    assert [rival.rule.nodes(running) for running in (1, 2, 3, 4, 1000)] == [2, 0, 0, 0, 0]


def test_keys_and_values_have_no_holes() -> None:
    """Of the target: every draw is that of the whole text, whatever paths, ends and slots came before.

    The drafter's own are compared one by one elsewhere.
    """
    rollout, _ = fastgrpo(requests(), slots=3)
    assert sum(sum(r.accepted_by_depth) for r in rollout.rounds) > 5
    for request, completion in zip(requests(), rollout.completions, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits_TV = plain("llama")[0](ids).logits[0, len(request.prompt_ids) - 1 : -1]
        chosen = torch.tensor(completion.token_ids)[:, None]
        expected = logits_TV.log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logp_raw), expected, rtol=0, atol=1e-4)


def test_a_draw_that_was_not_proposed_is_kept() -> None:
    """It is the token of plain decoding at its place, and costs no further round."""
    wanted = requests()
    rollout, _ = fastgrpo(wanted)
    assert tokens_of(rollout) == tokens_of(plain("llama")[1])
    alone, _ = fastgrpo(wanted[-1:])
    missed = [r for r in alone.rounds if r.proposed and not sum(r.accepted_by_depth)]
    assert missed and all(r.emitted == 1 for r in missed)
    assert all(r.emitted == 1 + sum(r.accepted_by_depth) for r in alone.rounds[:-1])
