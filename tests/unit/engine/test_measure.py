"""The measurement of what a pass costs: which passes it makes, in whose memory, and that it leaves things as found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specroll.budget import BASE_CONTEXT, ContextPrice, LatencyCurve, row_grid
from specroll.engine import Engine
from specroll.engine.measure import latency_curve
from specroll.model.cache import SlotCache
from specroll.model.target import HFTarget
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Request, SamplingParams
from tiny import tiny

LAW = SamplingParams()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def target() -> Iterator[HFTarget]:
    target = HFTarget(tiny("llama"))
    with target.rolling_out():
        yield target


@pytest.fixture
def passes(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(running, rows, context) of every pass."""
    made: list[tuple[int, int, int]] = []
    forward = target.forward_tree

    def noted(tree, length_S, longest):  # type: ignore[no-untyped-def]
        assert target.cache is not None and target.cache.length >= longest + tree.size
        assert length_S.tolist() == [longest] * target.cache.slots
        made.append((len(length_S), len(tree.token_N), longest))
        return forward(tree, length_S, longest)

    monkeypatch.setattr(target, "forward_tree", noted)
    return made


@pytest.mark.parametrize("slots", [1, 64])
def test_the_passes_do_not_depend_on_the_rollout_that_comes_first(
    target: HFTarget, passes: list[tuple[int, int, int]], slots: int
) -> None:
    """Every number of rows exactly, at the base context, and a few as far as the model's 512 positions go."""
    reserved = target.reserve(slots, 70)
    curve = latency_curve(target, LAW)
    assert target.cache is reserved
    assert curve.rows == tuple(row_grid(128)) == tuple(sorted({rows for _, rows, _ in passes}))
    near = {(running, rows) for running, rows, context in passes if context == BASE_CONTEXT}
    far = {at for at in passes if at[2] != BASE_CONTEXT}
    assert {(1, 1), (1, 7), (2, 10), (2, 14), (3, 12), (32, 128)} <= near
    assert far == {(1, 1, 511), (1, 8, 504), (4, 4, 508), (4, 16, 496)}
    assert {at[:2] for at in far} <= near


def test_a_second_look_costs_nothing(target: HFTarget, passes: list[tuple[int, int, int]]) -> None:
    target.reserve(2, 64)
    curve = latency_curve(target, LAW)
    passes.clear()
    assert latency_curve(target, LAW) == curve and not passes


def test_a_model_of_few_positions_has_no_price_of_context(
    target: HFTarget, passes: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.config, "max_position_embeddings", 100)
    curve = latency_curve(target, LAW)
    assert curve.context == ContextPrice() and {context for _, _, context in passes} == {92}


def test_what_their_sequences_read_is_no_cost_of_rows(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 1, 8 and 128 rows are of 1, 2 and 32 sequences behind the base context."""
    passes, price = LatencyCurve((1, 8, 128), (0.1, 0.2, 0.9)), ContextPrice(per_sequence=1e-4)
    monkeypatch.setattr("specroll.engine.measure.measure", lambda run, rows: passes)
    monkeypatch.setattr("specroll.engine.measure.measure_context", lambda run, points: price)
    curve, read = latency_curve(target, LAW), BASE_CONTEXT * 1e-4
    assert curve.context == price
    assert curve.seconds == pytest.approx((0.1 - read, 0.2 - 2 * read, 0.9 - 32 * read))


def test_an_engine_measures_amid_its_first_speculative_rollout_and_changes_no_token(
    tmp_path: Path,
) -> None:
    model = tiny("llama")
    heads = FutureHeads.for_model(model)
    torch.nn.init.normal_(heads.second_BHF, std=0.3, generator=torch.Generator().manual_seed(0))
    requests = [Request(prompt_ids=(3, 4, 5 + i), sample=i, max_new_tokens=12) for i in range(3)]
    plain = Engine(model).generate(requests, LAW)
    assert not (tmp_path / "specroll").exists()  # without a proposer there is nothing to decide
    engine = Engine(model, proposer=HeadsProposer(heads, model))
    for _ in range(2):
        spec = engine.generate(requests, LAW)
        assert [c.token_ids for c in spec.completions] == [c.token_ids for c in plain.completions]
        assert len(list((tmp_path / "specroll" / "latency").iterdir())) == 1


def test_an_interrupted_measurement_leaves_the_reserved_slots(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = target.reserve(2, 64)

    def interrupt(*_: object) -> LatencyCurve:
        raise KeyboardInterrupt

    monkeypatch.setattr("specroll.engine.measure.measure_context", interrupt)
    with pytest.raises(KeyboardInterrupt):
        latency_curve(target, LAW)
    assert target.cache is reserved


def test_slots_can_be_grouped_otherwise(target: HFTarget) -> None:
    slots = SlotCache(target.cache_shape, 4, 6)
    slots.kv.copy_(torch.arange(slots.kv.numel()).view_as(slots.kv))
    other = slots.regrouped(2, 11)
    assert (other.slots, other.length) == (2, 11)
    tokens = other.whole.numel()
    assert torch.equal(other.whole.flatten(2).flatten(), slots.whole.flatten(2)[:, :, : tokens // 4].flatten())
    other.kv[1, 0, 1] = -1.0  # the same memory
    assert (slots.whole == -1).sum() == other.kv[1, 0, 1].numel()
    with pytest.raises(ValueError, match="4 slots of 6 tokens hold no 5 of 5"):
        slots.regrouped(5, 5)
