from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import SPECULATE, grpo_trainer

from specroll.config import BudgetConfig
from specroll.engine import Engine
from specroll.propose.heads import FutureHeads
from specroll.slow import cold, path
from specroll.slow.path import SlowPath
from specroll.types import Request, SamplingParams, Trajectory
from tiny import EOS, tiny, tiny_tokenizer

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def trajectories(model: Any) -> list[Trajectory]:
    found: list[Trajectory] = []
    prompt = tuple(tiny_tokenizer()("3+4=")["input_ids"])
    requests = [Request(prompt_ids=prompt, sample=i, max_new_tokens=24) for i in range(64)]
    Engine(model, eos_ids=[EOS]).generate(requests, SamplingParams(temperature=0.5), on_trajectory=found.append)
    return found


def taught(learner: SlowPath, trajectories: Sequence[Trajectory], seconds: float = 10.0) -> bool:
    for trajectory in trajectories:
        learner.record(trajectory)
    return learner.learn(seconds)


def test_heads_learn_when_the_number_of_responses_has_doubled(model: Any, trajectories: list[Trajectory]) -> None:
    learner = SlowPath(FutureHeads.for_model(model), model)
    assert not taught(learner, trajectories[:20])
    assert not learner.heads.trained
    assert taught(learner, trajectories[20:40])
    assert learner.heads.trained
    assert learner.heads.vocabulary_V is not None
    assert not taught(learner, trajectories[40:50])
    assert taught(learner, trajectories[50:])
    assert learner.report is not None
    assert learner.report.fit.accepted_after[8] > learner.report.fit.accepted_before[8] > 0


def test_learning_ends(model: Any, trajectories: list[Trajectory]) -> None:
    learner = SlowPath(FutureHeads.for_model(model), model)
    learns = [taught(learner, trajectories, seconds=0.0) for _ in range(4)]
    assert learns == [True, True, False, True]
    assert learner.cold.completions == cold.LAST
    assert not learner.wants_more


def test_learning_takes_its_share_of_the_time(model: Any, trajectories: list[Trajectory], monkeypatch: Any) -> None:
    updates: list[int] = []
    real = path.fit

    def counted(*args: Any, updates_: list[int] = updates, **settings: Any) -> Any:
        updates_.append(settings["updates"])
        return real(*args, **settings)

    monkeypatch.setattr(path, "fit", counted)
    monkeypatch.setattr(cold, "MOST_UPDATES", 12)
    learner = SlowPath(FutureHeads.for_model(model), model)
    taught(learner, trajectories[:40], seconds=0.0)
    assert updates == [cold.LEAST_UPDATES]  # nothing is known of an update's cost yet
    taught(learner, trajectories[40:], seconds=1000.0)
    assert updates[-1] == cold.MOST_UPDATES
    learner.cold.rollout_seconds = 2 * (learner.seconds + 10 * learner._update_seconds)  # type: ignore[operator]
    assert learner.cold.updates(learner.seconds, learner._update_seconds) in (9, 10)


def test_memory_is_bounded(model: Any, trajectories: list[Trajectory], monkeypatch: Any) -> None:
    monkeypatch.setattr(path, "COLD_POSITIONS", 50)
    learner = SlowPath(FutureHeads.for_model(model), model)
    assert taught(learner, trajectories[:40], seconds=0.0)
    assert learner.cold.completions == 40
    assert 0 < sum(t.token_T.numel() for t in learner.reservoir.trajectories) <= 50


def test_responses_of_one_token_teach_nothing_and_do_no_harm(model: Any) -> None:
    one = Trajectory(torch.zeros(1, 32), torch.tensor([EOS]), torch.zeros(1, 32, dtype=torch.int64), torch.zeros(1, 32))
    learner = SlowPath(FutureHeads.for_model(model), model)
    assert not taught(learner, [one] * 40)


def test_progress_is_kept_beside_the_heads(model: Any, trajectories: list[Trajectory], tmp_path: Path) -> None:
    learner = SlowPath(FutureHeads.for_model(model), model)
    taught(learner, trajectories[:40], seconds=0.0)
    learner.save(tmp_path)
    again = SlowPath(learner.heads, model)
    again.load(tmp_path)
    assert again.cold.completions == 40
    assert not taught(again, trajectories[40:60], seconds=0.0)  # 60: the next time is 64
    assert taught(again, trajectories[60:], seconds=0.0)


def test_untrained_heads_decode_plainly_until_they_have_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "FIRST", 16)
    settings = {"heads": "learn", "budget": BudgetConfig(**SPECULATE)}
    trainer = grpo_trainer(tmp_path, trainer_settings=settings, max_steps=3, learning_rate=1e-4)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["specroll/acceptance"] > 0 for log in logs] == [False, False, True]
    assert ["specroll/learning_seconds" in log for log in logs] == [False, True, False]
    plain = grpo_trainer(tmp_path / "plain", trainer_settings={"heads": None}, max_steps=3, learning_rate=1e-4)
    plain.train()
    assert trainer.notes.completions == plain.notes.completions  # learning takes nothing from the run's own randomness
