"""One training sampled by five systems: what is recorded of each step, equal tokens, a shift, and what stays apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import SPECULATE, grpo_trainer, some_heads, watch_at_once
from peft import LoraConfig

from specroll.bench.adapt import SETTINGS, Contest, Shift, _Steps, systems
from specroll.config import BudgetConfig, EngineConfig, TrainConfig
from specroll.train.data import Task
from specroll.train.rollout import SpecRollout
from tiny import tiny

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
RUNNING = 4
NO_TASK: Any = Task("none", None, [], "boxed")  # type: ignore[arg-type]


def contest_of(
    folder: Path, *, shift: Shift | None = None, exact: bool = True, **settings: Any
) -> tuple[Any, Contest, list[dict[str, Any]]]:
    """A trainer whose rollouts are a contest, the contest, and where its steps' records go."""
    engine_config = EngineConfig(max_running=RUNNING)
    trainer = grpo_trainer(
        folder,
        trainer_settings={"heads": None, "engine_config": engine_config, "peft_config": LORA},
        **{"max_steps": 3, "max_completion_length": 10, **settings},
    )
    made = systems(some_heads(), TrainConfig(slow_share=0.5), RUNNING)
    for system in made.values():  # speculate whatever it costs on this machine
        system.budget = replace(system.budget, **SPECULATE)
    contest = Contest({"plain": trainer.rollout, **made}, exact=exact, shift=shift)
    steps: list[dict[str, Any]] = []
    trainer.rollout_func = contest
    trainer.add_callback(_Steps(contest, steps.append))
    return trainer, contest, steps


def alone_in(folder: Path, **settings: Any) -> Any:
    """The same training with plain decoding alone, when it has ended."""
    alone = grpo_trainer(
        folder, trainer_settings={"heads": None, "peft_config": LORA}, **{"max_completion_length": 10, **settings}
    )
    alone.train()
    return alone


def test_every_system_samples_every_step_and_the_trainer_learns_as_from_plain_decoding(tmp_path: Path) -> None:
    trainer, contest, steps = contest_of(tmp_path / "contest")
    trainer.train()
    alone = alone_in(tmp_path / "alone", max_steps=3)
    assert trainer.notes.completions == alone.notes.completions
    assert [step["step"] for step in steps] == [0, 1, 2] and not any(step["shifted"] for step in steps)
    assert len({tuple(step["order"]) for step in steps}) == 3
    rewards = [log["reward"] for log in alone.state.log_history if "reward" in log]
    assert [step["reward"] for step in steps] == rewards
    for step in steps:
        assert set(step["systems"]) == {"plain", *SETTINGS} and step["train_s"] > 0
        assert {s["tokens"] for s in step["systems"].values()} == {step["systems"]["plain"]["tokens"]}
        assert {s["differing"] for s in step["systems"].values()} == {0}
        assert step["systems"]["plain"]["proposed"] == 0
        assert all("reflex_open" in step["systems"][name] for name in ("heads+reflex", "full"))
        assert not any("reflex_open" in step["systems"][name] for name in ("plain", "heads", "heads+slow"))
    for name in SETTINGS:
        assert sum(step["systems"][name]["proposed"] for step in steps) > 0
        assert sum(step["systems"][name]["accepted"] for step in steps) > 0
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert all(log["specroll/logp_gap_max"] < 1e-4 for log in logs)  # the trainer looked at the same weights
    assert not any(key.startswith("specroll/tokens") for log in logs for key in log)  # nor are systems' logs mixed in
    check_apart(contest)


def check_apart(contest: Contest) -> None:
    """Systems share the target; heads, Reflex and slow path are their own."""
    engines = [system.engine for system in contest.systems.values()]
    assert len({id(engine.target) for engine in engines if engine is not None}) == 1
    assert engines[0] is not None and engines[0].target.cache is None
    proposers: list[Any] = [engine.proposer for engine in engines[1:] if engine is not None]
    assert len({id(proposer.heads) for proposer in proposers}) == 4
    assert [proposer.reflex for proposer in proposers] == [reflex for reflex, _ in SETTINGS.values()]
    assert [system.learner is not None for system in contest.systems.values()] == [False, False, False, True, True]


def test_what_the_slow_path_does_is_timed_and_stays_with_its_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_at_once(monkeypatch, updates=2)
    trainer, contest, steps = contest_of(tmp_path)
    trainer.train()
    last = steps[-1]["systems"]
    for name in ("heads+slow", "full"):
        assert all(step["systems"][name]["recording"] > 0 < step["systems"][name]["learning"] for step in steps)
        assert last[name]["triggers"] == len(steps) - 1 and "drift_score" in last[name] and "refresh_kept" in last[name]
        learner = contest.systems[name].learner
        assert learner is not None
        spent = sum(step["systems"][name]["recording"] + step["systems"][name]["learning"] for step in steps)
        assert spent == pytest.approx(learner.cadence.spent, abs=1e-4)
    for name in ("plain", "heads", "heads+reflex"):
        assert all(step["systems"][name]["recording"] == step["systems"][name]["learning"] == 0 for step in steps)
    kept = contest.systems["heads"].engine
    assert kept is not None
    heads: Any = kept.proposer
    assert all(torch.equal(a, b) for a, b in zip(heads.heads.parameters(), some_heads().parameters(), strict=True))


class _OtherNames(SpecRollout):
    """Draws with the noise of other samples."""

    def _samples(self, *args: Any) -> list[int]:
        return [name + 1000 for name in super()._samples(*args)]


class _OneWrong(SpecRollout):
    """Says another token at the end of one response."""

    def __call__(self, prompts: Any, trainer: Any) -> Any:
        output = super().__call__(prompts, trainer)
        assert self.latest is not None
        first = self.latest.completions[0]
        wrong = replace(first, token_ids=[*first.token_ids[:-1], first.token_ids[-1] ^ 1])
        self.latest = replace(self.latest, completions=[wrong, *self.latest.completions[1:]])
        return output


@pytest.mark.parametrize("kind", [_OtherNames, _OneWrong])
def test_other_tokens_than_plain_decodings_end_it(tmp_path: Path, kind: Any) -> None:
    trainer, contest, steps = contest_of(tmp_path)
    contest.systems["heads+slow"] = kind(some_heads(), budget=BudgetConfig(**SPECULATE))
    with pytest.raises(ValueError, match=r"the system heads\+slow sampled other tokens than plain decoding"):
        trainer.train()
    assert steps == []


def test_where_rounding_is_coarse_differing_samples_are_counted(tmp_path: Path) -> None:
    trainer, contest, steps = contest_of(tmp_path, exact=False, max_steps=1)
    contest.systems["full"] = _OneWrong(some_heads(), budget=BudgetConfig(**SPECULATE))
    trainer.train()
    assert [step["systems"]["full"]["differing"] for step in steps] == [1]
    assert all(step["systems"]["heads"]["differing"] == 0 for step in steps)


def test_a_shift_gives_the_policy_other_weights_and_tells_the_proposers(tmp_path: Path) -> None:
    other = tiny("llama", seed=1)
    trainer, contest, steps = contest_of(tmp_path / "shifted", shift=Shift(2, other, NO_TASK), max_steps=4)
    trainer.train()
    assert [step["shifted"] for step in steps] == [False, False, True, True]
    still = alone_in(tmp_path / "not", max_steps=4)
    tokens = [t.notes.completions[16:] for t in (trainer, still)]
    assert trainer.notes.completions[:16] == still.notes.completions[:16] and tokens[0] != tokens[1]
    base = trainer.model.get_base_model()
    own = {name.replace(".base_layer", ""): p for name, p in base.named_parameters() if "lora_" not in name}
    assert all(torch.equal(own[name], weight) for name, weight in other.named_parameters())
    assert any(p.detach().any() for name, p in base.named_parameters() if "lora_B" in name)
    for name in SETTINGS:
        engine = contest.systems[name].engine
        assert engine is not None and engine.proposer is not None and engine.proposer.version == 1
    assert all(step["systems"]["full"]["differing"] == 0 for step in steps)


def test_weights_that_heads_do_not_share_leave_proposers_alone(tmp_path: Path) -> None:
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(-1)
    trainer, contest, _ = contest_of(tmp_path, shift=Shift(1, other, NO_TASK), max_steps=2)
    trainer.train()
    proposers: list[Any] = [system.engine.proposer for system in contest.systems.values() if system.engine is not None]
    assert [proposer.version for proposer in proposers if proposer is not None] == [0] * 4
