"""A policy's learning is untouched: over a whole training, plain GRPO and SpecRoll's draw the same tokens.

Float32, the same seeds, all weights moving, heads that begin untrained, learn in the run, are watched and taught again,
and Reflex at work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import PROMPTS, SPECULATE, grpo_trainer, watch_at_once

from specroll.config import BudgetConfig
from specroll.slow import cold
from specroll.slow.cadence import Cadence
from tiny import tiny

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

STEPS, RESPONSES = 24, 8


def trained(folder: Path, heads: Any, **settings: Any) -> Any:
    trainer = grpo_trainer(
        folder,
        prompts=PROMPTS[:4],
        trainer_settings={"heads": heads, "budget": BudgetConfig(**SPECULATE)},
        **{"max_steps": STEPS, "max_completion_length": 16, **settings},
    )
    trainer.train()
    return trainer


def logs(trainer: Any, key: str) -> list[Any]:
    return [log.get(key) for log in trainer.state.log_history if "reward" in log]


@pytest.fixture
def busy_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads learn from the first step's responses, and are watched and taught again in later ones."""
    monkeypatch.setattr(cold, "FIRST", RESPONSES)
    monkeypatch.setattr(cold, "LAST", 4 * RESPONSES)
    watch_at_once(monkeypatch)
    monkeypatch.setattr(Cadence, "updates", lambda self, seconds: 4 if self.rollouts % 4 == 0 else 0)


@pytest.mark.usefixtures("busy_slow_path")
def test_plain_and_speculative_training_are_the_same_step_after_step(tmp_path: Path) -> None:
    plain, spec = trained(tmp_path / "plain", None), trained(tmp_path / "spec", "learn")
    assert len(plain.notes.completions) == STEPS * RESPONSES
    for step in range(STEPS):
        rows = slice(step * RESPONSES, (step + 1) * RESPONSES)
        assert plain.notes.rewarded[rows] == spec.notes.rewarded[rows], f"step {step}"
    assert logs(plain, "reward") == logs(spec, "reward") and len(set(logs(plain, "reward"))) > STEPS // 2
    assert logs(plain, "loss") == pytest.approx(logs(spec, "loss"), abs=1e-5)
    for before, after in zip(plain.model.parameters(), spec.model.parameters(), strict=True):
        torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-4)

    # The policy moved, and with it what it says: one that stays where it was draws other tokens with the same noise.
    moved = [(a - b).abs().max() for a, b in zip(plain.model.parameters(), tiny("llama").parameters(), strict=True)]
    assert min(moved) > 1e-3
    still = trained(tmp_path / "still", None, learning_rate=0.0)
    same = [a == b for a, b in zip(plain.notes.completions, still.notes.completions, strict=True)]
    assert all(same[:RESPONSES]) and sum(same[-4 * RESPONSES :]) < 2 * RESPONSES

    # And the heads did all that they can: learned from nothing, proposed, were corrected, and were taught again.
    learner = spec.rollout.learner
    assert learner.cold.over and learner.triggers >= 3 and learner.version >= 3
    acceptance = logs(spec, "specroll/acceptance")
    assert acceptance[0] == 0 and min(acceptance[1:]) > 0 and set(logs(plain, "specroll/acceptance")) == {0}
    assert max(logs(spec, "specroll/tokens_per_round")) > 1.2
    assert any(share is not None and share > 0 for share in logs(spec, "specroll/reflex_open"))
    kept = [done for done in logs(spec, "specroll/refresh_kept") if done is not None]
    assert len(kept) == learner.triggers
