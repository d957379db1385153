"""Rollouts depend on (weights, seed, sample, position) alone, end where they should, and carry the model's own odds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from replay import Replay

from specroll.budget import FixedPlanner
from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine
from specroll.engine.scheduler import Running
from specroll.oracle import oracle_generate
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.sampling import BadLogitsError, dense, process
from specroll.types import Completion, Request, SamplingParams
from specroll.verify import stop
from tiny import ARCHITECTURES, EOS, VOCAB_SIZE, tiny, tiny_tokenizer

SAMPLING = SamplingParams(seed=7, top_p=0.95)
PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (7, 8, 9, 10, 11, 12, 13, 14, 15, 16), (20, 21), (3, 4, 5, 6), (20, 21)]


pytestmark = pytest.mark.usefixtures("known_curve")


def requests(tokens: int = 16) -> list[Request]:
    return [Request(prompt_ids=p, sample=100 + i, max_new_tokens=tokens + i) for i, p in enumerate(PROMPTS)]


def tokens_of(completions: list[Completion]) -> dict[int, list[int]]:
    return {c.sample: c.token_ids for c in completions}


def perturbed_heads(model, **settings) -> HeadsProposer:  # type: ignore[no-untyped-def]
    heads = FutureHeads.for_model(model)
    torch.nn.init.normal_(heads.second_BHF, std=0.3, generator=torch.Generator().manual_seed(0))
    return HeadsProposer(heads, model, **settings)


def replay_of(completions: list[Completion], **settings) -> Replay:  # type: ignore[no-untyped-def]
    prompts = {100 + i: len(p) for i, p in enumerate(PROMPTS)}
    return Replay(tokens_of(completions), prompts, vocab_size=VOCAB_SIZE, **settings)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_transformers_greedy_search_with_the_noise(architecture: str) -> None:
    model = tiny(architecture)
    wanted = requests()
    completions = Engine(model, eos_ids=[EOS]).generate(wanted, SAMPLING).completions
    limit = max(r.max_new_tokens for r in wanted)
    oracle = oracle_generate(
        model, [list(r.prompt_ids) for r in wanted], [r.sample for r in wanted], SAMPLING, limit, [EOS]
    )
    for request, completion, expected in zip(wanted, completions, oracle, strict=True):
        assert completion.token_ids == expected[: request.max_new_tokens]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(seed=3, temperature=0.7, top_k=9, min_p=0.02)])
def test_speculation_changes_no_token(architecture: str, sampling: SamplingParams) -> None:
    model = tiny(architecture)
    plain = Engine(model).generate(requests(), sampling)
    known = tokens_of(plain.completions)
    proposers = [
        (perturbed_heads(model), BudgetConfig(fixed_nodes=1)),
        (perturbed_heads(model, ranking="probability"), BudgetConfig(fixed_nodes=8)),
        (perturbed_heads(model), BudgetConfig(max_nodes=6)),
        (replay_of(plain.completions), BudgetConfig(fixed_nodes=20)),
        (replay_of(plain.completions, wrong_after={100: 3, 102: 6}), BudgetConfig(fixed_nodes=20)),
    ]
    for proposer, budget in proposers:
        for slots in (2, 64):
            engine = Engine(model, proposer=proposer, budget=budget, config=EngineConfig(max_running=slots))
            rollout = engine.generate(requests(), sampling)
            assert tokens_of(rollout.completions) == known
            if budget.fixed_nodes:  # what pays is this machine's affair
                assert any(r.proposed for r in rollout.rounds)
    assert rollout.tokens_per_round > 1.5  # deep paths were really taken


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_trees_of_unequal_size_change_no_token(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is spread over the sequences by worth: here by chance, a different total in every round."""
    model = tiny(architecture)
    plain = Engine(model).generate(requests(), SAMPLING)
    totals = random.Random(0)
    monkeypatch.setattr(FixedPlanner, "nodes", lambda self, running, context: 4 * running)
    monkeypatch.setattr(FixedPlanner, "cut", lambda self, running, gain: totals.randrange(len(gain) + 1))
    for proposer in (perturbed_heads(model), replay_of(plain.completions, wrong_after={100: 3, 102: 6})):
        engine = Engine(model, proposer=proposer, budget=BudgetConfig(fixed_nodes=9))
        rollout = engine.generate(requests(), SAMPLING)
        assert tokens_of(rollout.completions) == tokens_of(plain.completions)
        assert any(r.proposed % r.running for r in rollout.rounds)


def test_neither_order_nor_mates_matter() -> None:
    model = tiny("llama")
    wanted = requests()
    known = tokens_of(Engine(model).generate(wanted, SAMPLING).completions)
    backwards = Engine(model, config=EngineConfig(max_running=3, prefill_tokens=5)).generate(wanted[::-1], SAMPLING)
    assert [c.sample for c in backwards.completions] == [r.sample for r in wanted[::-1]]
    assert tokens_of(backwards.completions) == known
    for request in wanted:
        (alone,) = Engine(model).generate([request], SAMPLING).completions
        assert alone.token_ids == known[request.sample]


def test_greedy_is_transformers_greedy() -> None:
    model = tiny("qwen2")
    (ours,) = (
        Engine(model)
        .generate([Request(prompt_ids=(5, 6, 7), sample=0, max_new_tokens=12)], SamplingParams(temperature=0))
        .completions
    )
    theirs = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert ours.token_ids == theirs[0, 3:].tolist()


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(temperature=0.8)])
def test_log_probabilities_are_those_of_a_full_forward(sampling: SamplingParams) -> None:
    model = tiny("gemma3")
    plain = Engine(model).generate(requests(), sampling)
    engine = Engine(model, proposer=replay_of(plain.completions), budget=BudgetConfig(fixed_nodes=20))
    for request, c in zip(requests(), engine.generate(requests(), sampling).completions, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *c.token_ids]])
        with torch.no_grad():
            logits_TV = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        chosen = torch.tensor(c.token_ids)[:, None]
        raw = logits_TV.log_softmax(-1).gather(1, chosen)[:, 0]
        law = process(logits_TV, sampling)
        processed = dense(law, VOCAB_SIZE).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(c.logp_raw), raw, rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor(c.logp), processed, rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor(c.kept_mass), law.kept_mass_N, rtol=0, atol=1e-4)
        assert len(c.token_ids) == len(c.logp) == len(c.logp_raw) == len(c.kept_mass)


def test_members_of_a_group_are_independent() -> None:
    """1,500 members of one prompt: their first two tokens follow the law; a shared first token would be one value."""
    model = tiny("llama")
    group = [Request(prompt_ids=(3, 4, 5), sample=i, max_new_tokens=2) for i in range(1500)]
    rollout = Engine(model, eos_ids=[]).generate(group, SamplingParams(seed=1))
    with torch.no_grad():
        law_V = model(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1)
    firsts = Counter(c.token_ids[0] for c in rollout.completions)
    seen_V = torch.tensor([firsts[v] / len(group) for v in range(VOCAB_SIZE)])
    assert 0.5 * (seen_V - law_V).abs().sum() < 0.06
    # Neighbours agree as often as independent draws do.
    agree = sum(
        a.token_ids[0] == b.token_ids[0] for a, b in zip(rollout.completions, rollout.completions[1:], strict=False)
    )
    assert abs(agree / len(group) - law_V.square().sum().item()) < 0.04


class TestEndings:
    def completions(self, eos_ids=(), stop=(), tokens: int = 20, **settings):  # type: ignore[no-untyped-def]
        """Plain without any stop, and with the given ones under a proposer whose paths run past every stop."""
        model = tiny("llama")
        free = Engine(model, eos_ids=[]).generate(requests(30), SAMPLING).completions
        engine = Engine(
            model, tiny_tokenizer(), proposer=replay_of(free), budget=BudgetConfig(fixed_nodes=20), eos_ids=eos_ids
        )
        return free, engine.generate(requests(tokens), SAMPLING, stop=stop, **settings)

    def test_any_of_several_eos_ids_ends_inside_an_accepted_path(self) -> None:
        free, _ = self.completions()
        eos_ids = {free[0].token_ids[6], free[2].token_ids[9]}
        _, rollout = self.completions(eos_ids=eos_ids)
        for a, b, request in zip(free, rollout.completions, requests(20), strict=True):
            end = next((i for i, t in enumerate(a.token_ids, 1) if t in eos_ids), None)
            if end is not None and end <= request.max_new_tokens:
                assert (b.token_ids, b.finish_reason) == (a.token_ids[:end], "eos")
            else:
                assert (len(b.token_ids), b.finish_reason) == (request.max_new_tokens, "length")
        assert rollout.tokens_per_round > 2

    def test_each_row_stops_at_its_own_limit(self) -> None:
        free, rollout = self.completions(tokens=7)
        for i, (a, b) in enumerate(zip(free, rollout.completions, strict=True)):
            assert b.token_ids == a.token_ids[: 7 + i] and b.finish_reason == "length"

    def test_a_stop_string_may_span_tokens(self) -> None:
        tokenizer = tiny_tokenizer()
        free, _ = self.completions()
        wanted = tokenizer.decode(free[2].token_ids[4:7])
        _, rollout = self.completions(stop=[wanted])
        assert rollout.completions[2].token_ids == free[2].token_ids[:7]
        assert rollout.completions[2].finish_reason == "stop"
        assert rollout.completions[2].text == tokenizer.decode(free[2].token_ids[:7])

    def test_the_first_token_may_be_the_last(self) -> None:
        free, _ = self.completions()
        _, rollout = self.completions(eos_ids=[free[0].token_ids[0]])
        assert rollout.completions[0].token_ids == free[0].token_ids[:1]
        single = Engine(tiny("llama")).generate([Request(prompt_ids=(3,), sample=0, max_new_tokens=1)], SAMPLING)
        assert len(single.completions[0].token_ids) == 1 and not single.rounds

    @pytest.mark.parametrize("bug", ["eos ignored inside a path", "length overshoot"])
    def test_planted_bugs_are_noticed(self, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
        cut = stop.StopRule.cut

        def broken(self, emitted, new, limit):  # type: ignore[no-untyped-def]
            if bug == "length overshoot":
                limit += 2
            taken, reason = cut(self, emitted, new, limit)
            return (len(new), reason) if bug.startswith("eos") else (taken, reason)

        monkeypatch.setattr(stop.StopRule, "cut", broken)
        with pytest.raises(AssertionError):
            self.test_any_of_several_eos_ids_ends_inside_an_accepted_path()


@pytest.mark.parametrize("bug", ["wrong noise position", "first token shared by a group", "shifted compaction"])
def test_planted_bugs_of_the_round_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specroll.engine import step
    from specroll.model.cache import SlotCache

    real = step.draw
    if bug == "wrong noise position":
        monkeypatch.setattr(step, "draw", lambda logits, s, sample, position: real(logits, s, sample, position // 2))
    elif bug == "first token shared by a group":
        monkeypatch.setattr(
            step,
            "draw",
            lambda logits, s, sample, position: real(
                logits, s, torch.where(position < 11, sample[0], sample), position
            ),
        )
    else:
        compact = SlotCache.compact
        monkeypatch.setattr(SlotCache, "compact", lambda self, slot, source, to: compact(self, slot, source - 1, to))
    with pytest.raises(AssertionError):
        if bug == "first token shared by a group":
            test_members_of_a_group_are_independent()
        elif bug == "wrong noise position":
            test_tokens_are_those_of_transformers_greedy_search_with_the_noise("llama")
        else:
            test_speculation_changes_no_token("llama", SAMPLING)


class TestWhatIsHeard:
    def test_streams_completions_and_trajectories_agree(self) -> None:
        model = tiny("llama")
        plain = Engine(model).generate(requests(), SAMPLING)
        engine = Engine(
            model,
            proposer=replay_of(plain.completions),
            budget=BudgetConfig(fixed_nodes=20),
            config=EngineConfig(max_running=3),
        )
        streamed: dict[int, list[int]] = {}
        finished, trajectories = {}, []
        rollout = engine.generate(
            requests(),
            SAMPLING,
            on_tokens=lambda i, new: streamed.setdefault(i, []).extend(new),
            on_completion=lambda i, c: finished.update({i: c}),
            on_trajectory=trajectories.append,
        )
        assert streamed == {i: c.token_ids for i, c in enumerate(rollout.completions)}
        assert finished == dict(enumerate(rollout.completions))
        by_tokens = {tuple(t.token_T.tolist()): t for t in trajectories}
        for request, c in zip(requests(), rollout.completions, strict=True):
            t = by_tokens[tuple(c.token_ids)]
            ids = torch.tensor([[*request.prompt_ids, *c.token_ids]])
            with torch.no_grad():
                out = model(ids, output_hidden_states=True)
            span = slice(len(request.prompt_ids) - 1, -1)
            torch.testing.assert_close(t.hidden_TH, out.hidden_states[-1][0, span], rtol=1e-3, atol=1e-4)
            law = dense(process(out.logits[0, span], SAMPLING), VOCAB_SIZE)
            torch.testing.assert_close(t.top_logp_TC[:, 0], law.max(-1).values, rtol=1e-3, atol=1e-4)
            assert not t.hidden_TH.is_inference()

    def test_statistics_add_up(self) -> None:
        model = tiny("llama")
        plain = Engine(model).generate(requests(), SAMPLING)
        engine = Engine(model, proposer=replay_of(plain.completions), budget=BudgetConfig(fixed_nodes=20))
        rollout = engine.generate(requests(), SAMPLING)
        assert sum(r.emitted for r in rollout.rounds) + len(PROMPTS) == rollout.tokens
        for r in rollout.rounds:
            assert sum(r.proposed_by_depth) == r.proposed == 20 * r.running
            assert r.accepted_by_depth == sorted(r.accepted_by_depth, reverse=True)
            assert set(r.seconds) >= {"propose", "verify", "draw", "commit", "observe"}
        assert plain.tokens_per_round == 1.0 and plain.acceptance == 0.0


class TestBadInput:
    @pytest.mark.parametrize(
        ("request_", "words"),
        [
            (Request(prompt_ids=(), sample=0, max_new_tokens=5), "empty prompt"),
            (Request(prompt_ids=(3,) * 500, sample=0, max_new_tokens=50), "max_new_tokens <= 12"),
            (Request(prompt_ids=(3, 61), sample=0, max_new_tokens=5), "vocabulary of 61"),
            (Request(prompt_ids=(3, -1), sample=0, max_new_tokens=5), "token -1"),
            (Request(prompt_ids=(3,), sample=0, max_new_tokens=0), "at least 1"),
        ],
    )
    def test_a_bad_request_is_named(self, request_: Request, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            Engine(tiny("llama")).generate([request_], SAMPLING)

    def test_equal_samples_are_refused(self) -> None:
        twice = [Request(prompt_ids=(3,), sample=4, max_new_tokens=2)] * 2
        with pytest.raises(ValueError, match="repeats sample 4"):
            Engine(tiny("llama")).generate(twice, SAMPLING)

    def test_too_little_memory_names_the_setting_that_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specroll.model.cache.free_bytes", lambda device: 30_000)
        with pytest.raises(ValueError, match=r"Set max_running=[1-9]") as error:
            Engine(tiny("llama")).generate(requests(), SAMPLING)
        fits = int(str(error.value).split("max_running=")[1].split(",")[0])
        Engine(tiny("llama"), config=EngineConfig(max_running=fits)).generate(requests(), SAMPLING)

    def test_nan_logits_stop_the_rollout_and_keep_what_was_finished(self) -> None:
        model = tiny("llama")
        finished: dict[int, Completion] = {}

        def poison(index: int, completion: Completion) -> None:
            finished[index] = completion
            with torch.inference_mode(False), torch.no_grad():
                model.lm_head.weight[5] = float("nan")

        with pytest.raises(BadLogitsError):
            Engine(model).generate(requests(), SAMPLING, on_completion=poison)
        assert finished

    def test_no_requests_is_no_work(self) -> None:
        assert Engine(tiny("llama")).generate([], SAMPLING).completions == []

    def test_an_interruption_keeps_what_was_finished_and_the_engine_usable(self) -> None:
        engine = Engine(tiny("llama"))
        known = tokens_of(engine.generate(requests(), SAMPLING).completions)
        finished: list[Completion] = []

        def stop_after_two(index: int, completion: Completion) -> None:
            finished.append(completion)
            if len(finished) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests(), SAMPLING, on_completion=stop_after_two)
        assert all(known[c.sample] == c.token_ids for c in finished)
        assert tokens_of(engine.generate(requests(), SAMPLING).completions) == known


def test_positions_follow_the_tokens() -> None:
    row = Running(0, Request(prompt_ids=(1, 2, 3), sample=0, max_new_tokens=9))
    row.append([(7, -1.0, -1.0, 1.0)])
    assert (row.root, row.length) == (7, 3)
