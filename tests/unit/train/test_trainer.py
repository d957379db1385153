from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import (
    PROMPTS,
    SPECULATE,
    NotingPlainTrainer,
    grpo_args,
    grpo_trainer,
    letters,
    rows,
    some_heads,
    watch_at_once,
)
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from specroll.config import BudgetConfig, EngineConfig, SlowConfig
from specroll.report.history import DRIFT_SCORE, GAP_MAX, GAP_MEAN, LEARNING_SECONDS, REFLEX_OPEN, REFRESH_KEPT, REGRET
from specroll.report.live import GENERATION_SHARE, REWARD, STEP_SECONDS
from specroll.slow import cold, path
from specroll.slow.consolidate import consolidate
from specroll.slow.path import SlowPath
from specroll.train.proposers import SAVED_HEADS
from specroll.train.rollout import SpecRollout
from specroll.train.trainer import SpecRollGRPOTrainer
from tiny import PAD, tiny, tiny_tokenizer

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
CHAT = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def settings(heads: Any = "some", **engine: Any) -> dict[str, Any]:
    return {"heads": some_heads() if heads == "some" else heads, "budget": BudgetConfig(**SPECULATE), **engine}


def unpadded(inputs: dict[str, Any]) -> list[tuple[tuple[int, ...], list[int], float]]:
    """(prompt ids, completion ids, advantage) of each row that a loss was computed from."""
    found = []
    for row in range(len(inputs["advantages"])):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()].tolist()
        found.append((tuple(prompt), completion, inputs["advantages"][row].item()))
    return found


def test_rewards_and_advantages_belong_to_their_responses(tmp_path: Path) -> None:
    """From the ids that the loss saw, every advantage is computed anew; two slots make responses end out of order."""
    trainer = grpo_trainer(
        tmp_path,
        prompts=CHAT,
        trainer_settings=settings(engine_config=EngineConfig(max_running=2)),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        max_completion_length=30,
    )
    trainer.train()
    for step in (0, 1):
        lengths = [len(ids) for ids in trainer.notes.completions[8 * step : 8 * step + 8]]
        assert lengths != sorted(lengths)
    tokenizer = tiny_tokenizer()
    row_of = {
        tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]): i
        for i, chat in enumerate(CHAT)
    }
    assert len(trainer.notes.loss_inputs) == 4
    # A response that had changed places with another would be improbable after its prompt.
    assert all(log["specroll/logp_gap_max"] < 1e-4 for log in trainer.state.log_history if "reward" in log)
    for step in (0, 1):
        first, second = trainer.notes.loss_inputs[2 * step : 2 * step + 2]
        groups: dict[tuple[int, ...], list[tuple[list[int], float]]] = defaultdict(list)
        for prompt, completion, advantage in unpadded(first) + unpadded(second):
            groups[prompt].append((completion, advantage))
        assert len(groups) == 2
        for prompt, members in groups.items():
            rewards = torch.tensor([letters(ids) for ids, _ in members])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            torch.testing.assert_close(torch.tensor([a for _, a in members]), expected, atol=1e-4, rtol=1e-4)
            rewarded = [ids for _, ids, row in trainer.notes.rewarded[8 * step : 8 * step + 8] if row == row_of[prompt]]
            assert sorted(rewarded) == sorted(ids for ids, _ in members)
            assert rewards.std() > 0  # else the test sees nothing


def test_speculation_changes_neither_tokens_nor_rewards_of_a_training(tmp_path: Path) -> None:
    runs = []
    for name, heads in (("plain", None), ("spec", "some")):
        trainer = grpo_trainer(tmp_path / name, trainer_settings=settings(heads), max_steps=4)
        trainer.train()
        runs.append(trainer)
    plain, spec = runs
    assert plain.notes.completions == spec.notes.completions
    assert len({tuple(ids) for ids in plain.notes.completions}) > 20
    logs = [[log for log in run.state.log_history if "reward" in log] for run in runs]
    assert [log["reward"] for log in logs[0]] == [log["reward"] for log in logs[1]]
    assert all(log["specroll/acceptance"] == 0 for log in logs[0])
    assert any(log["specroll/acceptance"] > 0 for log in logs[1])
    assert any(log["specroll/tokens_per_round"] > 1 for log in logs[1])
    for before, after in zip(plain.model.parameters(), spec.model.parameters(), strict=True):
        torch.testing.assert_close(before, after, atol=1e-3, rtol=1e-2)


def test_the_measures_are_in_the_trainers_logs(tmp_path: Path) -> None:
    trainer = grpo_trainer(
        tmp_path,
        trainer_settings=settings(),
        temperature=0.8,
        top_p=0.9,
        gradient_accumulation_steps=2,
        logging_steps=2,
    )
    trainer.train()
    trained = next(log for log in trainer.state.log_history if "reward" in log)
    evaluated = trainer.evaluate()
    for log, prefix in ((trained, ""), (evaluated, "eval_")):
        assert log[f"{prefix}specroll/tokens_per_second"] > 0
        assert log[f"{prefix}specroll/tokens_per_round"] >= 1
        assert 0 <= log[f"{prefix}specroll/acceptance"] <= 1
        assert 0 < log[f"{prefix}specroll/logp_gap_mean"] <= log[f"{prefix}specroll/logp_gap_max"] < 1e-4
    assert 0 < trained["specroll/generation_share"] < 1


def test_the_measures_reach_every_reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard, W&B and trackio are callbacks whose `on_log` gets all there is."""
    watch_at_once(monkeypatch, degraded=True)
    heard: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            heard.append(dict(logs))

    trainer = grpo_trainer(tmp_path, trainer_settings=settings(), max_steps=3)
    trainer.add_callback(Reporter())
    trainer.train()
    steps = [logs for logs in heard if "reward" in logs]
    assert len(steps) == 3
    names = ["tokens_per_second", "tokens_per_round", "acceptance", "reflex_open", "generation_share", "logp_gap_mean"]
    names += ["logp_gap_max", "drift_score", "regret", "triggers", "slow_share"]
    names += [f"acceptance_{k}" for k in range(1, 5)]
    late = ["refresh_kept", "learning_seconds", "heads_version"]  # the first rollout only teaches the next ones
    for logs, expected in zip(steps, (names, names + late, names + late), strict=True):
        assert {name for name in expected if not isinstance(logs.get(f"specroll/{name}"), float)} == set()
        shares = [logs[f"specroll/acceptance_{k}"] for k in range(1, 5)]
        assert 1 >= shares[0] >= shares[1] >= shares[2] >= shares[3] >= 0
        # Of the tokens of a round, what lies behind the end of a response is not emitted.
        assert 1 <= logs["specroll/tokens_per_round"] <= 1 + sum(shares) + 1e-6
    assert all(name in steps[-1] for name in (LEARNING_SECONDS, REFLEX_OPEN, DRIFT_SCORE, REGRET, REFRESH_KEPT))
    assert all(name in steps[-1] for name in (GAP_MEAN, GAP_MAX, REWARD, STEP_SECONDS, GENERATION_SHARE))


def test_the_gap_is_a_tokens_mean_and_a_true_maximum(tmp_path: Path) -> None:
    """A rollout whose log-probabilities are off by a known amount, in a batch of two micro-batches."""
    trainer = grpo_trainer(
        tmp_path,
        trainer_settings=settings(None),
        max_steps=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    )
    real = trainer.rollout_func

    def off(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = real(prompts, trainer)
        logps = [
            [logp + 0.5 * (row == 3 and i == 0) for i, logp in enumerate(row_)]
            for row, row_ in enumerate(output["logprobs"])
        ]
        return {**output, "logprobs": logps}

    trainer.rollout_func = off
    trainer.train()
    log = trainer.state.log_history[0]
    tokens = sum(len(ids) for ids in trainer.notes.completions)
    assert log["specroll/logp_gap_max"] == pytest.approx(0.5, abs=1e-4)
    assert log["specroll/logp_gap_mean"] == pytest.approx(0.5 / tokens, abs=1e-4)


def test_no_gap_is_measured_once_the_weights_have_moved(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, trainer_settings=settings(None), num_iterations=2, max_steps=4)
    trainer.train()
    measured = ["specroll/logp_gap_max" in log for log in trainer.state.log_history if "loss" in log]
    assert measured == [True, False, True, False]
    assert len(trainer.notes.rewarded) == 16  # a rollout serves two updates


def test_lora_with_gradient_checkpointing(tmp_path: Path) -> None:
    trainer = grpo_trainer(
        tmp_path,
        trainer_settings={**settings(), "peft_config": LORA},
        gradient_checkpointing=True,
        max_steps=3,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    gaps = [log["specroll/logp_gap_max"] for log in trainer.state.log_history if "reward" in log]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    modules = list(trainer.model.modules())
    assert all(module.training for module in modules)
    assert any(getattr(module, "gradient_checkpointing", False) for module in modules)
    assert trainer.model.config._attn_implementation != "specroll"


def test_mixed_precision_samples_from_the_trainers_own_numerics(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, trainer_settings=settings(), bf16=True)
    trainer.train()
    gaps = [log["specroll/logp_gap_mean"] for log in trainer.state.log_history if "reward" in log]
    assert len(gaps) == 2
    assert max(gaps) < 0.05


def test_a_resumed_training_goes_on_as_if_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "FIRST", 8)
    learning = {**settings("learn"), "peft_config": LORA}
    whole = grpo_trainer(tmp_path, trainer_settings=learning, max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / SAVED_HEADS / "heads.json").is_file()
    assert whole.rollout.learner.report is not None
    resumed = grpo_trainer(tmp_path / "again", trainer_settings=learning, max_steps=4)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.notes.completions == whole.notes.completions[16:]
    assert resumed.rollout.learner.cold.completions == 32
    assert resumed.rollout.engine.proposer is not None
    for expected, found in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_evaluation_uses_its_own_number_of_generations(tmp_path: Path) -> None:
    trainer = grpo_trainer(
        tmp_path, trainer_settings=settings(None), num_generations_eval=2, per_device_eval_batch_size=2
    )
    trainer.evaluate()
    assert len(trainer.notes.rewarded) == 4
    assert len({tuple(ids) for ids in trainer.notes.completions}) > 2


def test_repetition_penalty_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"repetition_penalty=1.1"):
        grpo_trainer(tmp_path, repetition_penalty=1.1)


def test_a_second_rollout_func_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="brings its own rollout_func"):
        grpo_trainer(tmp_path, trainer_settings={"rollout_func": print})


def test_a_trainer_that_ignores_the_rollout_is_told(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, trainer_settings=settings(None))
    trainer.rollout_func = lambda prompts, _: {
        "prompt_ids": [[5, 6]] * len(prompts),
        "completion_ids": [[7]] * len(prompts),
        "logprobs": [[-1.0]] * len(prompts),
    }
    with pytest.raises(RuntimeError, match="did not call its rollout_func"):
        trainer.train()


def test_the_plain_door_gives_the_same_training(tmp_path: Path) -> None:
    """`rollout_func=SpecRollout()` on TRL's own trainer; TRL says there that the argument is experimental."""
    with pytest.warns(UserWarning, match="rollout_func"):
        door = grpo_trainer(
            tmp_path / "a", trainer_type=NotingPlainTrainer, trainer_settings={"rollout_func": SpecRollout(None)}
        )
    own = grpo_trainer(tmp_path / "b", trainer_settings=settings(None))
    door.train()
    own.train()
    assert door.notes.completions == own.notes.completions
    assert any("specroll/tokens_per_second" in log for log in door.state.log_history)


def test_our_trainer_does_not_frighten(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
        SpecRollGRPOTrainer(
            model=tiny("llama"),
            reward_funcs=len,
            args=grpo_args(tmp_path),
            train_dataset=rows(),
            processing_class=tiny_tokenizer(),
        )
    assert issubclass(SpecRollGRPOTrainer, GRPOTrainer)
    assert tiny_tokenizer().pad_token_id == PAD


def test_heads_that_are_given_are_watched_taught_and_kept_in_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_at_once(monkeypatch, degraded=True)
    monkeypatch.setattr(path, "consolidate", lambda *args, **given: (True, consolidate(*args, **given)[1]))
    plain = grpo_trainer(tmp_path / "plain", trainer_settings=settings(None), max_steps=4)
    plain.train()
    trainer = grpo_trainer(tmp_path, trainer_settings=settings(), max_steps=4, save_strategy="steps", save_steps=4)
    trainer.train()
    assert trainer.notes.completions == plain.notes.completions
    logs = [log for log in trainer.state.log_history if "reward" in log]
    for key in ("drift_score", "regret", "triggers", "slow_share"):
        assert all(f"specroll/{key}" in log for log in logs), key
    learner = trainer.rollout.learner
    assert learner.triggers == logs[-1]["specroll/triggers"] == 3  # the first rollout only teaches the next ones
    assert [log["specroll/refresh_kept"] for log in logs[1:]] == [1.0] * 3
    assert [log["specroll/heads_version"] for log in logs[1:]] == [1.0, 2.0, 3.0]
    assert trainer.rollout.engine.proposer.version >= learner.version == 3
    assert all(log["specroll/learning_seconds"] > 0 for log in logs[1:])
    resumed = SpecRollout(some_heads(), budget=BudgetConfig(**SPECULATE))
    resumed.restore(tmp_path / "checkpoint-4")
    resumed.engine_of(trainer)
    assert resumed.learner is not None and resumed.learner.triggers == resumed.learner.version == 3
    assert resumed.learner.reservoir.positions > 0


def test_heads_that_stay_as_good_are_watched_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_at_once(monkeypatch, degraded=False)
    monkeypatch.setattr("specroll.slow.path.DRAWS", 1 << 30)  # the window stays open
    heads = some_heads()
    trainer = grpo_trainer(tmp_path, trainer_settings=settings(heads))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert all("specroll/regret" in log and "specroll/refresh_kept" not in log for log in logs)
    assert trainer.rollout.learner._tally[0] > 0, "hits of the rollouts themselves are counted"
    told: list[bool] = []
    monkeypatch.setattr(SlowPath, "wants_more", property(lambda self: told.append(self.alarmed)))
    for raised in (True, False):
        trainer.rollout.engine.alarm.raised = raised
        trainer.rollout(PROMPTS[:1] * 2, trainer)
    assert told == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), some_heads().parameters(), strict=True))


def test_the_slow_path_switched_off_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_at_once(monkeypatch, degraded=True)
    trainer = grpo_trainer(
        tmp_path, trainer_settings=settings(slow=SlowConfig(slow="off")), save_strategy="steps", save_steps=2
    )
    trainer.train()
    assert trainer.rollout.learner is None
    assert not (tmp_path / "checkpoint-2" / SAVED_HEADS).exists()
    assert not any("specroll/drift_score" in log for log in trainer.state.log_history)
