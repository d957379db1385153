"""A drafter learns from what rollouts pass by: its loss falls, more of what it proposes is drawn, it goes on later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafted import PROMPTS, QUICK, SAMPLING, drafter_of, plain, recorded, requests, seen_by, tokens_of

from specroll.engine import Engine
from specroll.rivals.context import Passage
from specroll.rivals.fastgrpo import FastGRPO
from specroll.rivals.learn import passages_of, pretrain
from specroll.rivals.loss import losses
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Request, SamplingParams
from tiny import tiny

ONLINE = FastGRPOConfig(capacity=40, learning_rate=1e-2)
SURE = SamplingParams(temperature=0)  # what is said can be foreseen, by a drafter that knows the policy


def more_requests(round_: int, tokens: int = 24) -> list[Request]:
    return [Request(prompt_ids=PROMPTS[i % 3], sample=1000 * round_ + i, max_new_tokens=tokens) for i in range(12)]


class TestInARun:
    def trained(self, rounds: int) -> tuple[list[float], list[float], FastGRPO]:
        model = tiny("llama")
        rival = FastGRPO.for_model(model, config=ONLINE)
        engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[])
        loss, accepted = [], []
        for round_ in range(rounds):
            rollout = engine.generate(more_requests(round_)[:4], SURE)
            accepted.append(rollout.tokens_per_round)
            assert rival.learner.learn(rollout.seconds)
            assert rival.learner.report is not None
            loss.append(rival.learner.report.before.total(ONLINE))
        return loss, accepted, rival

    def test_the_loss_falls_and_acceptance_rises(self) -> None:
        loss, accepted, rival = self.trained(10)
        assert loss[-1] < 0.7 * loss[0]
        assert accepted[-1] > accepted[0] + 0.5
        learner = rival.learner
        assert learner.version == rival.proposer.version == 10
        assert not learner.wants_more  # and nothing had to be recorded for it
        assert learner.measures["drafter_hits"] > 0 and learner.measures["learning_seconds"] > 0

    def test_a_rollout_teaches_once_and_by_its_own_responses(self) -> None:
        model = tiny("llama")
        rival = FastGRPO.for_model(model, config=ONLINE)
        engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[])
        assert not rival.learner.learn(1.0) and rival.learner.report is None
        engine.generate(more_requests(0), SAMPLING)
        engine.generate(more_requests(1)[:5], SAMPLING)  # an evaluation, say: the first one's are gone
        before = {name: weight.clone() for name, weight in rival.drafter.state_dict().items()}
        assert rival.learner.learn(1.0)
        assert rival.learner.report is not None
        assert (rival.learner.report.responses, rival.learner.report.updates) == (5, 1)
        after = rival.drafter.state_dict()
        assert all(not torch.equal(before[name], after[name]) for name in before)
        # One step of AdamW moves no weight by more than its rate (and decay).
        assert max((before[name] - after[name]).abs().max() for name in before) < 1.1 * ONLINE.learning_rate
        assert not rival.learner.learn(1.0) and rival.learner.measures == {}

    def test_the_drafter_proposes_by_what_it_has_learned(self) -> None:
        _, _, rival = self.trained(2)
        before = rival.proposer._network
        rival.proposer.begin(1, 4)
        assert rival.proposer._network is not before, "it was taught after the latest rollout"
        for name, weight in rival.proposer._network.state_dict().items():
            assert torch.equal(weight, rival.drafter.state_dict()[name])
        after = rival.proposer._network
        rival.proposer.begin(1, 4)
        assert rival.proposer._network is after

    def test_states_that_are_not_finite_teach_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = plain("llama")[0]
        rival = FastGRPO.for_model(model, config=ONLINE)
        good, bad = (recorded(model, requests()[:1])[0] for _ in range(2))
        bad = bad._replace(hidden_TH=bad.hidden_TH.clone())
        bad.hidden_TH[3, 2] = torch.inf
        short = Passage(good.hidden_TH[:4], good.token_T[:4], 4)
        monkeypatch.setattr(rival.proposer, "take", lambda: [bad, good, short])
        assert rival.learner.learn(1.0)
        assert rival.learner.report is not None and rival.learner.report.responses == 1
        assert rival.learner.refused == 1
        assert all(weight.isfinite().all() for weight in rival.drafter.state_dict().values())
        monkeypatch.setattr(rival.proposer, "take", lambda: [bad])
        assert not rival.learner.learn(1.0)

    def test_a_loss_that_is_not_finite_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = plain("llama")[0]
        rival = FastGRPO.for_model(model, config=ONLINE)
        (good,) = recorded(model, requests()[:1])
        huge = good._replace(hidden_TH=good.hidden_TH * 1e30)
        monkeypatch.setattr(rival.proposer, "take", lambda: [huge])
        before = [p.clone() for p in rival.drafter.parameters()]
        monkeypatch.setattr(
            "specroll.rivals.learn.losses", lambda *a, learn: losses(*a, learn=learn)._replace(law=float("nan"))
        )
        assert not rival.learner.learn(1.0)
        assert rival.learner.version == rival.proposer.version == 0
        assert all(torch.equal(a, b) for a, b in zip(before, rival.drafter.parameters(), strict=True))

    def test_an_interrupted_learning_goes_on(self, tmp_path: Path) -> None:
        model, teach = plain("llama")[0], recorded(plain("llama")[0], requests())
        whole, first = (FastGRPO.for_model(model, config=ONLINE) for _ in range(2))
        for rival in (whole, first):
            rival.proposer.take = lambda: teach[:3]  # type: ignore[method-assign]
            rival.learner.learn(1.0)
        first.learner.save(tmp_path)
        second = FastGRPO.for_model(model, tmp_path, ONLINE)
        second.learner.load(tmp_path)
        assert second.learner.version == 1
        for rival in (whole, second):
            rival.proposer.take = lambda: teach[3:]  # type: ignore[method-assign]
            rival.learner.learn(1.0)
        assert second.learner.version == 2
        for a, b in zip(whole.drafter.parameters(), second.drafter.parameters(), strict=True):
            assert torch.equal(a, b)


class TestBeforeARun:
    def test_it_learns_what_holds_for_responses_it_has_not_seen(self) -> None:
        model = plain("llama")[0]
        drafter = drafter_of("llama", taught=False)
        heard: list[int] = []
        taught = pretrain(
            drafter, model, recorded(model, more_requests(0)), updates=20, config=QUICK, held_out=0.2,
            on_progress=lambda done, of, told: heard.append(done),
        )  # fmt: skip
        assert heard == list(range(1, 21)) and taught.responses == 9
        assert taught.after is not None
        assert taught.after.total(QUICK) < 0.9 * taught.before.total(QUICK)
        assert taught.after.hits > taught.before.hits
        fresh = losses(drafter, model, recorded(model, more_requests(2)[:4]), QUICK, learn=False)
        assert fresh.total(QUICK) < 0.9 * taught.before.total(QUICK)

    def test_the_seed_decides(self) -> None:
        model, teach = plain("llama")[0], recorded(plain("llama")[0], more_requests(0))
        config = FastGRPOConfig(fit_learning_rate=1e-2, batch_responses=4)
        results = []
        for seed in (0, 0, 1):
            drafter = drafter_of("llama", taught=False)
            pretrain(drafter, model, teach, updates=3, config=config, seed=seed)
            results.append(drafter.fuse.weight.detach())
        assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])

    def test_recorded_responses_get_their_prompts_states(self) -> None:
        model, rollout = plain("llama")
        wanted = requests()
        _, trajectories = Engine(model, eos_ids=[]).record(wanted, SAMPLING)
        for request, passage in zip(wanted, recorded(model, wanted), strict=True):
            text = [*request.prompt_ids, *tokens_of(rollout)[request.sample]]
            assert passage.token_T.tolist() == text[1:] and passage.prompt == len(request.prompt_ids)
            torch.testing.assert_close(passage.hidden_TH, seen_by(model, text)[:-1], rtol=1e-3, atol=1e-4)
        with pytest.raises(ValueError, match="6 and 1 prompts"):
            passages_of(model, trajectories, [(3, 4)])

    def test_nothing_to_learn_from_is_said(self) -> None:
        model = plain("llama")[0]
        drafter = drafter_of("llama", taught=False)
        with pytest.raises(ValueError, match="none of the 0"):
            pretrain(drafter, model, [], updates=3)
        with pytest.raises(ValueError, match="at least one update"):
            pretrain(drafter, model, recorded(model, requests()), updates=0)
