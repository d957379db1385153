"""The rival's tuning finds what is best in a known landscape, and times what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from datasets import Dataset

from specroll.bench.compare import Rates
from specroll.bench.methods import Setting
from specroll.bench.methods_tuning import GRID, PLAIN, rollouts, search, tune
from specroll.config import TrainConfig
from specroll.rivals.eagle import Drafter
from specroll.rivals.proposer import FastGRPOProposer
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import save_drafter
from specroll.train.data import Task
from tiny import tiny, tiny_tokenizer

BEST = {"capacity": 32, "most_rows": 8, "least_depth": 1, "most_branches": 4}


class Landscape:
    """Rates that fall with every constant that is not as in `BEST`, on a machine that slows down all the time."""

    def __init__(self) -> None:
        self.asked: list[dict[str, FastGRPOConfig | None]] = []

    def __call__(self, some: Mapping[str, FastGRPOConfig | None]) -> dict[str, Rates]:
        self.asked.append(dict(some))
        moods = (1.0, 0.5 / len(self.asked))
        return {name: Rates([mood * self.rate(config) for mood in moods]) for name, config in some.items()}

    def rate(self, config: FastGRPOConfig | None) -> float:
        if config is None:
            return 100.0
        return 150.0 - 20.0 * sum(getattr(config, name) != value for name, value in BEST.items())


def test_the_best_settings_are_found_whatever_the_machines_mood() -> None:
    timed = Landscape()
    found = search(timed)
    assert found["settings"] == BEST and found["over_plain"] == pytest.approx(1.5)
    assert [len(some) for some in timed.asked] == [1 + len(GRID["capacity"]), *(len(GRID[n]) for n in list(GRID)[1:])]
    assert all(some[PLAIN] is None for some in timed.asked)
    assert len(found["tried"]) == sum(map(len, GRID.values())) - 3
    assert all(tried.keys() == {*GRID, "tokens_per_second", "over_plain"} for tried in found["tried"])
    first = found["tried"][0]
    assert (first["capacity"], first["most_rows"], first["least_depth"], first["most_branches"]) == (8, 160, 3, 8)
    assert first["over_plain"] == pytest.approx(0.7), "three are not at their best"


def test_the_authors_settings_are_among_those_tried() -> None:
    authors = {name: getattr(FastGRPOConfig(), name) for name in GRID}
    assert all(value in GRID[name] for name, value in authors.items())
    assert any({name: tried[name] for name in GRID} == authors for tried in search(Landscape())["tried"])


def test_settings_that_cannot_win_leave_the_earlier_ones() -> None:
    def timed(some: Mapping[str, FastGRPOConfig | None]) -> dict[str, Rates]:
        return {
            name: Rates([100.0 if c is None or (c.capacity == 48 and c.most_rows == 160) else 50.0])
            for name, c in some.items()
        }

    assert search(timed)["settings"]["most_rows"] == 160


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    save_drafter(Drafter.for_model(tiny("llama")), tmp_path / "drafter", tiny("llama"))
    return tmp_path


@pytest.mark.parametrize(("batch", "batches"), [("1x2", 2), ("3x2", 1)])
def test_every_try_samples_the_same_requests(
    folder: Path, batch: str, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specroll.engine import Engine

    sampled: list[tuple[object, ...]] = []
    generate = Engine.generate

    def noted(self: Engine, requests: list[object], sampling: object) -> object:
        rollout = generate(self, requests, sampling)  # type: ignore[arg-type]
        capacity = self.proposer.rule.config.capacity if isinstance(self.proposer, FastGRPOProposer) else None
        sampled.append(
            (
                capacity,
                self.config.max_running,
                tuple(requests),
                sampling,
                tuple(c.token_ids[0] for c in rollout.completions),
            )
        )
        return rollout

    monkeypatch.setattr(Engine, "generate", noted)
    setting = Setting(str(folder / "model"), "-", "d", 0.9, batch, str(folder / "drafter"))
    config = TrainConfig(model=setting.model, max_completion=4, top_p=0.9, lora_rank=2, dtype="float32")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+1?"}]} for i in range(4)])
    ran: list[str] = []
    found = tune(setting, config, Task("d", rows, [], "number"), lambda name, rate: ran.append(name))
    assert found["settings"].keys() == GRID.keys()
    assert len(ran) == rollouts(setting) == len(sampled) - 1, "one is not counted"
    assert ran.count(PLAIN) == batches * len(GRID) and {c for c, *_ in sampled} >= {None, *GRID["capacity"]}
    assert len({of[1:] for of in sampled}) == batches and all(of[1] == setting.running for of in sampled)
    assert sampled[0][3].top_p == 0.9 and all(r.max_new_tokens == 4 for r in sampled[0][2])  # type: ignore[attr-defined]
