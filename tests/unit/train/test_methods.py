"""What samples in a training: each method by its name, and what it has no use for is refused."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import SPECULATE, NotingPlainTrainer, grpo_trainer, some_heads

from specroll.config import BudgetConfig, EngineConfig, SlowConfig, TrainConfig
from specroll.propose import catalog
from specroll.propose.blend import Blend
from specroll.propose.suffix import SuffixProposer
from specroll.report.records import RunFolder
from specroll.rivals.eagle import Drafter
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import save_drafter
from specroll.train import methods
from specroll.train.hf_rollout import HFRollout
from specroll.train.methods import RolloutSettings, sampler
from specroll.train.proposers import SAVED_HEADS, SAVED_PROPOSERS
from specroll.train.resume import resumed
from specroll.train.rival import SAVED_DRAFTER
from specroll.train.rollout import SpecRollout
from tiny import VOCAB_SIZE, tiny

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.usefixtures("known_curve"),
]

PROPOSER = f"""
import torch
from pathlib import Path
from specroll.types import Draft

class Counting:
    fails = False
    def __init__(self, model, tokenizer):
        self.asked = 0
    def propose(self, features):
        self.asked += 1
        if self.fails:
            raise RuntimeError("out of ideas")
        token_SKC = (features.root_S[:, None, None] + torch.arange(12).view(1, 2, 6)) % {VOCAB_SIZE}
        return Draft(token_SKC, torch.zeros(token_SKC.shape), torch.full(token_SKC.shape, 0.3))
    def observe(self, draft, tree, verdict, out=None): ...
    def save(self, folder):
        (folder / "asked").write_text(str(self.asked))
    def load(self, folder):
        self.asked = int((folder / "asked").read_text())
"""
COUNTING = "counting_proposer:Counting"


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "counting_proposer.py").write_text(PROPOSER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counting_proposer", raising=False)
    return COUNTING


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "reward" in log]


def test_hf_is_the_training_that_trl_does_by_itself(tmp_path: Path) -> None:
    theirs = grpo_trainer(tmp_path / "trl", trainer_type=NotingPlainTrainer, max_steps=3)
    theirs.train()
    ours = grpo_trainer(tmp_path / "hf", trainer_settings={"method": "hf"}, max_steps=3)  # seeds PyTorch's generator
    ours.train()
    assert len({tuple(ids) for ids in theirs.notes.completions}) > 12
    assert ours.notes.completions == theirs.notes.completions
    for mine, their in zip(ours.notes.loss_inputs, theirs.notes.loss_inputs, strict=True):
        assert mine.keys() == their.keys()
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for log, their in zip(logs_of(ours), logs_of(theirs), strict=True):
        assert set(log) - set(their) == {"specroll/tokens_per_second", "specroll/generation_share"}
        assert 0 < log["specroll/generation_share"] < 1
        tokens = log["completions/mean_length"] * 8
        seconds = log["specroll/generation_share"] * log["step_time"]
        assert log["specroll/tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
    evaluated = ours.evaluate()
    assert evaluated["eval_specroll/tokens_per_second"] > 0


def test_hf_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    whole = grpo_trainer(tmp_path, trainer_settings={"method": "hf"}, max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    again = grpo_trainer(tmp_path / "again", trainer_settings={"method": "hf"}, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.notes.completions == whole.notes.completions[16:]


def test_hf_may_do_what_the_engine_cannot(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, trainer_settings={"method": "hf"}, repetition_penalty=1.1, max_steps=1)
    trainer.train()
    assert logs_of(trainer)


def test_plain_is_the_engine_without_proposals(tmp_path: Path) -> None:
    plain = grpo_trainer(tmp_path / "plain", trainer_settings={"method": "plain"})
    heads = grpo_trainer(
        tmp_path / "heads", trainer_settings={"heads": some_heads(), "budget": BudgetConfig(**SPECULATE)}
    )
    plain.train()
    heads.train()
    assert plain.notes.completions == heads.notes.completions
    assert all(log["specroll/tokens_per_round"] == 1 for log in logs_of(plain))
    assert not any("specroll/proposer_faults" in log for log in logs_of(plain))
    assert all(log["specroll/proposer_faults"] == 0 for log in logs_of(heads))


def test_a_proposer_of_ones_own_trains_and_is_kept_in_checkpoints(tmp_path: Path, counting: str) -> None:
    settings = {"proposers": counting, "budget": BudgetConfig(**SPECULATE)}
    plain = grpo_trainer(tmp_path / "plain", trainer_settings={"method": "plain"})
    trainer = grpo_trainer(tmp_path / "own", trainer_settings=settings, save_strategy="steps", save_steps=2)
    plain.train()
    trainer.train()
    assert trainer.notes.completions == plain.notes.completions
    assert trainer.rollout.learner is None, "no heads learn where none are named"
    asked = trainer.rollout.engine.proposer.asked
    assert asked > 4 and all(log["specroll/acceptance"] > 0 for log in logs_of(trainer))
    assert all("specroll/acceptance_2" in log for log in logs_of(trainer))
    checkpoint = tmp_path / "own" / "checkpoint-2"
    assert (checkpoint / SAVED_PROPOSERS / "counting_proposer-Counting" / "asked").read_text() == str(asked)
    resumed_rollout = SpecRollout(proposers=counting, budget=BudgetConfig(**SPECULATE))
    resumed_rollout.restore(checkpoint)
    engine = resumed_rollout.engine_of(trainer)
    assert engine.proposer is not trainer.rollout.engine.proposer and engine.proposer.asked == asked  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"method": "fastgrpo"}, SAVED_DRAFTER),
        ({"proposers": "suffix", "budget": BudgetConfig(**SPECULATE)}, f"{SAVED_PROPOSERS}/suffix"),
        ({"proposers": "heads,suffix", "heads": some_heads(), "budget": BudgetConfig(**SPECULATE)}, SAVED_HEADS),
    ],
    ids=["fastgrpo", "suffix", "heads,suffix"],
)
def test_other_proposers_train_as_plain_decoding_does_and_go_on_from_checkpoints(
    tmp_path: Path, settings: dict[str, Any], kept: str
) -> None:
    plain = grpo_trainer(tmp_path / "plain", trainer_settings={"method": "plain"}, max_steps=4)
    plain.train()
    trainer = grpo_trainer(
        tmp_path / "own", trainer_settings=settings, max_steps=4, save_strategy="steps", save_steps=2
    )
    trainer.train()
    assert trainer.notes.completions == plain.notes.completions
    assert max(log["specroll/acceptance"] for log in logs_of(trainer)) > 0
    assert all(log["specroll/proposer_faults"] == 0 for log in logs_of(trainer))
    assert (tmp_path / "own" / "checkpoint-2" / kept).is_dir()
    again = grpo_trainer(tmp_path / "again", trainer_settings=settings, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-2"))
    assert again.notes.completions == plain.notes.completions[16:]


def test_what_a_blend_has_learned_is_kept_in_checkpoints(tmp_path: Path) -> None:
    settings = {"proposers": "suffix,heads", "heads": some_heads(), "budget": BudgetConfig(**SPECULATE)}
    trainer = grpo_trainer(tmp_path / "own", trainer_settings=settings, save_strategy="steps", save_steps=2)
    trainer.train()
    learned = trainer.rollout.engine.proposer.hits.state_dict()
    assert learned["promised_I"].sum() > 0
    again = SpecRollout(some_heads(), proposers="suffix,heads", budget=BudgetConfig(**SPECULATE))
    again.restore(tmp_path / "own" / "checkpoint-2")
    blend = again.engine_of(trainer).proposer
    assert isinstance(blend, Blend) and blend is not trainer.rollout.engine.proposer
    kept = blend.hits.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in learned.items())
    suffix = blend.members[0]
    assert isinstance(suffix, SuffixProposer) and suffix.store.tokens > 0, "and what its members remember"


def test_the_rival_trains_with_a_drafter_that_it_is_given_and_then_with_its_own(tmp_path: Path) -> None:
    given = Drafter.for_model(tiny("llama"), seed=8)
    folder = save_drafter(given, tmp_path / "drafter", tiny("llama"))
    rival = FastGRPOConfig(capacity=12, learning_rate=1e-3)
    settings = {"method": "fastgrpo", "drafter": folder, "rival": rival}
    trainer = grpo_trainer(tmp_path / "own", trainer_settings=settings, save_strategy="steps", save_steps=2)
    trainer.train()
    taught = trainer.rollout.proposers.method.drafter.state_dict()
    off = max((taught[name] - weight).abs().max() for name, weight in given.state_dict().items())
    assert 0 < off < 5e-3, "it went on from the given one, two steps of a thousandth"
    assert trainer.rollout.engine.rule.config is rival
    with pytest.raises(ValueError, match=r"no drafter in .*gone"):
        sampler(RolloutSettings(drafter=tmp_path / "gone"), "fastgrpo")
    again = sampler(RolloutSettings(drafter=folder, rival=rival), "fastgrpo")
    again.restore(tmp_path / "own" / "checkpoint-2")
    again.engine_of(trainer)  # type: ignore[attr-defined]
    kept = again.proposers.method.drafter.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(kept[name], weight) for name, weight in taught.items())


def test_faults_of_a_training_are_in_its_logs(
    tmp_path: Path, counting: str, proposer_faults: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("counting_proposer").Counting, "fails", True)
    plain = grpo_trainer(tmp_path / "plain", trainer_settings={"method": "plain"}, max_steps=3)
    plain.train()
    settings = {"proposers": counting, "budget": BudgetConfig(**SPECULATE)}
    trainer = grpo_trainer(tmp_path / "own", trainer_settings=settings, max_steps=3)
    trainer.train()
    assert trainer.notes.completions == plain.notes.completions
    assert [log["specroll/proposer_faults"] for log in logs_of(trainer)] == [3, 3, 3]
    assert trainer.rollout.faults == 3 and trainer.rollout.engine.guard.disabled
    assert ["'Counting' failed" in record.getMessage() for record in proposer_faults] == [True, True]


def test_several_proposers_go_on_without_heads_that_have_not_learned(
    tmp_path: Path, counting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are put beside the others once they know something, in the order of the names."""
    installed: list[list[str]] = []

    def together(proposers: list[Any], vocab_size: int) -> Any:
        installed.append([proposer.name for proposer in proposers])
        return proposers[-1] if proposers else None

    monkeypatch.setattr(catalog, "together", together)
    monkeypatch.setattr("specroll.slow.cold.FIRST", 8)
    trainer = grpo_trainer(tmp_path, trainer_settings={"proposers": f"{counting},heads"}, max_steps=3)
    trainer.train()
    assert installed[0] == ["Counting"] and installed[-1] == ["Counting", "heads"]


def test_a_method_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="method is one of specroll, plain, hf, fastgrpo, got 'vllm'"):
        sampler(RolloutSettings(), "vllm")  # type: ignore[arg-type]
    assert set(methods._METHODS) == {"specroll", "plain", "hf", "fastgrpo"}
    assert isinstance(sampler(RolloutSettings(), "hf"), HFRollout)


@pytest.mark.parametrize(
    ("method", "settings", "unused"),
    [
        ("plain", {"heads": "runs/heads"}, "heads"),
        ("plain", {"heads": None}, "heads"),
        ("plain", {"proposers": "suffix"}, "proposers"),
        ("plain", {"budget": BudgetConfig(max_nodes=3)}, "budget"),
        ("hf", {"slow": SlowConfig(slow="off")}, "slow"),
        ("hf", {"engine_config": EngineConfig(max_running=2)}, "engine_config"),
        ("hf", {"heads": some_heads()}, "heads"),
    ],
)
def test_settings_that_a_method_has_no_use_for_are_refused(method: Any, settings: dict[str, Any], unused: str) -> None:
    with pytest.raises(ValueError, match=f"the method {method} has no use for {unused}: leave it out"):
        sampler(RolloutSettings(**settings), method)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "plain", "heads": "runs/heads", "max_nodes": 3}, "plain has no use for heads, max_nodes"),
        ({"method": "plain", "reflex": "off"}, "plain has no use for reflex"),
        ({"method": "plain", "drafter": "d"}, "plain has no use for drafter"),
        ({"drafter": "d"}, "specroll has no use for drafter"),
        ({"method": "hf", "demo": True}, "hf has no use for demo"),
        ({"method": "hf", "budget": "paper"}, "hf has no use for budget"),
        ({"method": "fastgrpo", "max_nodes": 4}, "fastgrpo has no use for max_nodes"),
        ({"method": "slow"}, "method is one of"),
        ({"proposers": "heads;suffix"}, "got 'heads;suffix'"),
        ({"proposers": "a:B", "reflex": "off"}, "reflex is for heads, which proposers='a:B' leaves out"),
        ({"proposers": "a:B,heads", "heads": "none"}, "leave one of the two out"),
    ],
)
def test_options_of_a_run_are_held_against_its_method(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**settings)


def test_what_any_method_uses_is_left_alone() -> None:
    for method in ("plain", "hf", "fastgrpo"):
        config = TrainConfig(method=method, top_p=0.9, seed=3, lora_rank=4, steps=5)  # type: ignore[arg-type]
        assert (config.method, config.top_p, config.lora_rank) == (method, 0.9, 4)
    assert TrainConfig(method="plain", demo=True).demo
    speculative = TrainConfig(proposers="heads,a:B", heads="runs/heads", reflex="hidden", max_nodes=4)
    assert (speculative.reflex, speculative.max_nodes) == ("hidden", 4)


def started(folder: Path, **settings: Any) -> Path:
    config = TrainConfig(output=folder, **settings)
    RunFolder(folder).start({name: getattr(config, name) for name in TrainConfig.__dataclass_fields__})
    return folder


def test_a_resumed_run_keeps_its_method(tmp_path: Path) -> None:
    folder = started(tmp_path, method="plain")
    assert resumed(TrainConfig(), folder).method == "plain"
    assert resumed(TrainConfig(method="plain", steps=9), folder).steps == 9
    for other in ("specroll", "hf"):
        with pytest.raises(ValueError, match=f"is a run of the method plain and cannot go on with {other}"):
            resumed(TrainConfig(method=other), folder)  # type: ignore[arg-type]


def test_a_run_of_before_there_were_methods_is_one_of_specroll(tmp_path: Path) -> None:
    RunFolder(tmp_path).start({"task": "chain_sum", "seed": 4})
    assert resumed(TrainConfig(method="specroll"), tmp_path).seed == 4
    with pytest.raises(ValueError, match="is a run of the method specroll"):
        resumed(TrainConfig(method="plain"), tmp_path)


def test_a_file_alone_has_nothing_imported(tmp_path: Path) -> None:
    folder = started(tmp_path, proposers="heads,evil:Code")
    with pytest.raises(ValueError, match=r"imported only if you name them yourself: give --proposers heads,evil:Code"):
        resumed(TrainConfig(), folder)
    assert resumed(TrainConfig(proposers="heads,evil:Code"), folder).proposers == "heads,evil:Code"
    with pytest.raises(ValueError, match="cannot go on with others"):
        resumed(TrainConfig(proposers="heads"), folder)
    with pytest.raises(ValueError, match="cannot go on with others"):
        resumed(TrainConfig(proposers="suffix"), started(tmp_path / "heads"))
    with pytest.raises(ValueError, match="give --proposers"):
        resumed(TrainConfig(), started(tmp_path / "other", proposers="evil:Code"))
