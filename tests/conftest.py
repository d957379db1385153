"""What all tests share: no network, repeatable property tests, a known price of a pass, and the real default model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Before transformers is imported anywhere: a test that reaches for the network fails at once and says so.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import settings
from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from specroll.budget import LatencyCurve

# The same examples in every run, and no time limit per example: the machine may be busy.
settings.register_profile("specroll", derandomize=True, deadline=None)
settings.load_profile("specroll")


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and on a busy machine the two would mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(threads if "real_model" in request.fixturenames else 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def float32_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" is depends on the processor; that tokens and logits are equal is asked of float32."""
    monkeypatch.setattr("specroll.model.load.multiplies_bfloat16", lambda device: False)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def guarded(request: pytest.FixtureRequest) -> Iterator[list[logging.LogRecord]]:
    """A guard turns a proposer's mistake into a plain round, and a mistake of ours would pass unseen: here it does not.

    What guards have told; a test that expects something asks for `proposer_faults`.
    """
    kept, logger = _Kept(), logging.getLogger("specroll.guard")
    logger.addHandler(kept)
    yield kept.records
    logger.removeHandler(kept)
    if kept.records and "proposer_faults" not in request.fixturenames:
        error = kept.records[0].exc_info
        raise AssertionError(kept.records[0].getMessage()) from (error[1] if error else None)


@pytest.fixture
def proposer_faults(guarded: list[logging.LogRecord]) -> list[logging.LogRecord]:
    return guarded


@pytest.fixture
def known_curve(monkeypatch: pytest.MonkeyPatch) -> LatencyCurve:
    """What engines take a pass to cost instead of measuring it, which takes seconds: equal in every run, and nothing
    is read from or left in the user's cache. Rows are free up to 23 and cost their full price beyond: C_hw = 20."""
    from specroll.budget import ContextPrice, LatencyCurve

    curve = LatencyCurve((1, 23, 230), (0.023, 0.023, 0.230), ContextPrice(1e-6, 1e-7))
    monkeypatch.setattr("specroll.engine.engine.latency_curve", lambda target, sampling: curve)
    return curve


@pytest.fixture(scope="session")
def real_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The default model in float32 on the CPU, with its tokenizer. Shared: leave its weights as they are."""
    from specroll.model import default
    from specroll.model.load import load_model

    reason = default.damage(default.folder())
    if reason is not None:
        pytest.skip(f"the default model cannot be used: {reason}. `make setup` prepares it.")
    return load_model(dtype="float32", device="cpu")
