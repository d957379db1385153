from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo import PROMPTS, SPECULATE, grpo_trainer, some_heads

from specroll.config import BudgetConfig, EngineConfig, ReflexName
from specroll.engine import Rollout
from specroll.train.rollout import SpecRollout, _log, sample_name, tempered_logps
from specroll.train.terms import sampling_of, tokenize, unwrapped
from specroll.types import Completion, RoundStats
from tiny import EOS, tiny, tiny_tokenizer

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return grpo_trainer(tmp_path_factory.mktemp("run"), trainer_settings={"heads": None})


def stand_in(trainer: Any, *, step: int = 0, training: bool = True, rank: int = 0, **settings: Any) -> Any:
    """The trainer as a rollout sees it, at some step of a run."""
    args = SimpleNamespace(**{**vars(trainer.args), **settings})
    accelerator = SimpleNamespace(
        process_index=rank,
        device=torch.device("cpu"),
        state=trainer.accelerator.state,
        gather=lambda values: values,
        unwrap_model=trainer.accelerator.unwrap_model,
    )
    names = (
        "processing_class", "chat_template", "chat_template_kwargs", "eos_token_ids", "tools", "model_wrapped",
        "is_fsdp_enabled", "is_deepspeed_enabled", "_metrics",
    )  # fmt: skip
    return SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=training),
        state=SimpleNamespace(global_step=step),
        accelerator=accelerator,
        **{name: getattr(trainer, name) for name in names},
    )


def completions_of(rollout: SpecRollout, prompts: list[str], trainer: Any, **where: Any) -> list[list[int]]:
    return rollout(prompts, stand_in(trainer, **where))["completion_ids"]


def test_sample_names_differ_in_every_part_and_fit_an_int64() -> None:
    places = [
        {"eval": e, "step": s, "call": c, "rank": r, "row": w}
        for e in (False, True)
        for s in (0, 1, (1 << 22) - 1)
        for c in (0, 1, (1 << 16) - 1)
        for r in (0, 1, 1023)
        for w in (0, 1, (1 << 14) - 1)
    ]
    names = {sample_name(**place) for place in places}
    assert len(names) == len(places)
    assert all(0 <= name < 1 << 63 for name in names)


def test_a_place_beyond_the_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row is 16384.*16383"):
        sample_name(eval=False, step=0, call=0, rank=0, row=1 << 14)


def test_logps_are_untruncated_at_the_temperature() -> None:
    completion = Completion(
        sample=0,
        token_ids=[5],
        logp_raw=[-9.0],
        logp=[math.log(0.5)],
        kept_mass=[0.8],
        finish_reason="length",
        policy_version=0,
    )
    assert tempered_logps(completion) == pytest.approx([math.log(0.4)])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "no_repeat_ngram_size=3"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams=2"),
        ({"use_vllm": True}, "use_vllm"),
    ],
)
def test_settings_that_are_not_exact_are_refused_by_name(trainer: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sampling_of(stand_in(trainer, **settings))


def test_the_trainers_sampling_is_used(trainer: Any) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": None, "seed": 11}
    sampling, stop = sampling_of(
        stand_in(trainer, **settings, generation_kwargs={"stop_strings": "\n", "do_sample": True})
    )
    found = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
    assert found == (0.7, 0.9, 5, 0.0, 11)
    assert stop == ("\n",)


def test_tools_and_sharded_models_are_refused(trainer: Any) -> None:
    there = stand_in(trainer)
    there.tools = [print]
    with pytest.raises(ValueError, match="tools"):
        sampling_of(there)
    there.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="FSDP"):
        unwrapped(there)


@pytest.mark.parametrize(
    "prompts", [["3+4=", "ab"], [[{"role": "user", "content": "3+4="}], [{"role": "system", "content": "x"}]]]
)
def test_prompts_are_tokenized_as_the_trainer_does(trainer: Any, prompts: list[Any]) -> None:
    assert tokenize(prompts, trainer) == trainer._tokenize_prompts(prompts)[0]


def test_a_prompt_that_does_not_fit_is_named(trainer: Any) -> None:
    with pytest.raises(
        ValueError, match=r"prompt 1 of this batch \(it begins 'xxxx.*505 tokens.*max_completion_length <= 7"
    ):
        SpecRollout(None)(["a", "x" * 505], stand_in(trainer))
    with pytest.raises(ValueError, match="prompt 0 of this batch is empty"):
        SpecRollout(None)(["", "a"], stand_in(trainer))


def test_order_is_kept_whatever_runs_together(trainer: Any) -> None:
    prompts = [PROMPTS[i] for i in (0, 1, 0, 2, 1, 3, 0, 1)]  # groups interleaved, two slots for eight rows
    one = SpecRollout(None, engine_config=EngineConfig(max_running=2))(prompts, stand_in(trainer))
    other = SpecRollout(None)(prompts, stand_in(trainer))
    assert one["prompt_ids"] == tokenize(prompts, trainer)
    assert one["completion_ids"] == other["completion_ids"]
    assert [len(ids) for ids in one["completion_ids"]] == [len(logps) for logps in one["logprobs"]]
    for prompt, completion, logps in zip(*one.values(), strict=True):  # each row belongs to its own prompt
        logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logps), expected, atol=2e-5, rtol=0)


def test_no_draw_is_repeated_along_a_run(trainer: Any) -> None:
    """Members of a group, the next call, the next step, another rank and evaluation: all draw afresh."""
    rollout = SpecRollout(None)
    prompts = ["3+4="] * 4
    drawn = [
        completions_of(rollout, prompts, trainer, step=0),
        completions_of(rollout, prompts, trainer, step=0),
        completions_of(rollout, prompts, trainer, step=1),
        completions_of(rollout, prompts, trainer, step=1, training=False),
        completions_of(SpecRollout(None), prompts, trainer, step=1, rank=1),
    ]
    texts = {tuple(ids) for batch in drawn for ids in batch if len(ids) > 3}
    assert len(texts) == sum(len(ids) > 3 for batch in drawn for ids in batch) > 10


def test_a_resumed_run_draws_what_the_first_one_drew(trainer: Any) -> None:
    first, prompts = SpecRollout(None), ["3+4="] * 4
    for step in (0, 0, 1):
        completions_of(first, prompts, trainer, step=step)
    completions_of(first, prompts, trainer, step=1, training=False)  # an evaluation in between moves nothing
    again = SpecRollout(None)
    for _ in range(2):
        assert completions_of(first, prompts, trainer, step=2) == completions_of(again, prompts, trainer, step=2)


@pytest.mark.parametrize(("reflex", "told"), [("associative", "reflex_open"), ("hidden", "reflex_matured")])
def test_speculation_changes_no_token(trainer: Any, reflex: ReflexName, told: str) -> None:
    prompts = [p for p in PROMPTS[:3] for _ in range(4)]
    plain = SpecRollout(None)(prompts, stand_in(trainer))
    speculating = SpecRollout(some_heads(), budget=BudgetConfig(**SPECULATE, reflex=reflex))
    spec = speculating(prompts, stand_in(trainer))
    assert trainer._metrics["train"][f"specroll/{told}"][-1] > 0
    assert trainer._metrics["train"]["specroll/acceptance"][-1] > 0
    assert plain["completion_ids"] == spec["completion_ids"]
    for expected, found in zip(plain["logprobs"], spec["logprobs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_eos_is_kept_and_stop_strings_end_a_response(trainer: Any) -> None:
    prompts = ["3+4="] * 16
    ids = SpecRollout(None)(prompts, stand_in(trainer, max_completion_length=60))["completion_ids"]
    assert any(row[-1] == EOS for row in ids)
    assert all(EOS not in row[:-1] for row in ids)
    settings: dict[str, Any] = {"max_completion_length": 60, "generation_kwargs": {"stop_strings": ["7"]}}
    stopped = SpecRollout(None)(prompts, stand_in(trainer, **settings))["completion_ids"]
    letter = tiny_tokenizer().convert_tokens_to_ids("7")
    assert any(row[-1] == letter for row in stopped)
    for row, whole in zip(stopped, ids, strict=True):
        assert row == (whole[: whole.index(letter) + 1] if letter in whole else whole)


def test_memory_is_given_back_and_the_model_left_as_it_was(trainer: Any) -> None:
    rollout = SpecRollout(None)
    model = trainer.model.train()
    rollout(["ab"], stand_in(trainer))
    assert rollout.engine is not None and rollout.engine.target.cache is None
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation != "specroll"


def test_heads_of_another_model_are_refused(trainer: Any, tmp_path: Path) -> None:
    from specroll.propose.heads import FutureHeads
    from specroll.propose.store import HeadsMismatchError, save_heads

    other = tiny("llama", seed=5)
    save_heads(FutureHeads.for_model(other), tmp_path, other)
    with pytest.raises(HeadsMismatchError):
        SpecRollout(tmp_path)(["ab"], stand_in(trainer))


ROUNDS = [
    RoundStats(running=4, proposed=12, emitted=8, accepted_by_depth=[3, 1, 0], proposed_by_depth=[6, 4, 2]),
    RoundStats(running=3, emitted=3),  # plain: no part of what proposals are worth
    RoundStats(running=1, proposed=1, emitted=2, accepted_by_depth=[1], proposed_by_depth=[1]),
]


def logged(trainer: Any, rounds: list[RoundStats], horizons: int | None, *others: list[float]) -> dict[str, float]:
    """What `_log` adds, where `others` are the totals of other ranks."""
    there = stand_in(trainer)
    there._metrics = {"train": defaultdict(list)}
    there.accelerator.gather = lambda own: torch.cat([own, *(torch.tensor([row]) for row in others)])
    proposer = None if horizons is None else SimpleNamespace(horizons=horizons)
    _log(Rollout([], rounds, 2.0), SimpleNamespace(proposer=proposer), there, "train", 2)  # type: ignore[arg-type]
    return {key.removeprefix("specroll/"): value for key, (value,) in there._metrics["train"].items()}


def test_acceptance_by_horizon_is_a_share_of_the_sequences_that_speculated(trainer: Any) -> None:
    found = logged(trainer, ROUNDS, 4)
    shares = [found[f"acceptance_{k}"] for k in (1, 2, 3, 4)]
    assert shares == pytest.approx([4 / 5, 1 / 5, 0, 0])
    assert found["acceptance"] == pytest.approx(5 / 13)
    assert found["tokens_per_round"] == pytest.approx((8 + 3 + 2) / 8)
    assert 1 + sum(shares) == pytest.approx((8 + 2) / 5)  # tokens of a sequence in a round that speculated


def test_ranks_are_taken_together(trainer: Any) -> None:
    other = [30.0, 4.0, 5.0, 9.0, 10.0, 4.0, 5.0, 1.0, 2.0, 2.0]  # of five sequences two drew both proposed tokens
    found = logged(trainer, ROUNDS, 2, other)
    assert found["proposer_faults"] == 2 + 1
    assert (found["acceptance_1"], found["acceptance_2"]) == pytest.approx((6 / 10, 3 / 10))
    assert found["tokens_per_second"] == pytest.approx(30 / 4)


def test_where_nothing_was_proposed_no_horizon_is_logged(trainer: Any) -> None:
    plain = [RoundStats(running=2, emitted=2)]
    names = {"tokens_per_second", "tokens_per_round", "acceptance"}
    assert set(logged(trainer, plain, None)) == names
    for horizons in (0, 4):
        assert set(logged(trainer, plain, horizons)) == names | {"proposer_faults"}


def test_a_proposer_that_tells_no_horizons_has_those_of_its_trees(trainer: Any) -> None:
    assert logged(trainer, ROUNDS, 0) == logged(trainer, ROUNDS, max(len(r.accepted_by_depth) for r in ROUNDS))
