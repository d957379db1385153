"""The memory against a plain loop, and its gate on errors whose truth is known."""

from __future__ import annotations

import pytest
import torch

from specroll.reflex.memory import ENOUGH, HALF_LIVES, SKETCH, Memory, rms

CPU = torch.device("cpu")
WIDTH = 40


def one(sequences: int, horizons: int) -> Memory:
    memory = Memory(horizons, WIDTH, CPU)
    memory.follow(torch.zeros(sequences, dtype=torch.int64), torch.zeros(sequences, dtype=torch.bool))
    return memory


def test_errors_of_a_round_are_learned_in_the_order_of_their_times() -> None:
    generator = torch.Generator().manual_seed(0)
    sequences, roots, horizons = 3, 4, 2
    memory = one(sequences, horizons)
    memory.memory_SKH = torch.randn(sequences, horizons, WIDTH, generator=generator) * 0.3
    error_SRKH = torch.randn(sequences, roots, horizons, WIDTH, generator=generator)
    severity_SRK = torch.rand(sequences, roots, horizons, generator=generator)
    usable_SRK = torch.rand(sequences, roots, horizons, generator=generator) < 0.6
    time_SR = torch.stack([torch.randperm(9, generator=generator)[:roots] for _ in range(sequences)])
    before_SRKX = torch.randn(sequences, roots, horizons, SKETCH, generator=generator)
    expected, evidence = memory.memory_SKH.clone(), torch.zeros(sequences, horizons, 3)
    for s in range(sequences):
        for k, half_life in enumerate(HALF_LIVES):
            rho = 0.5 ** (1 / half_life)
            for r in time_SR[s].argsort().tolist():
                if not usable_SRK[s, r, k]:
                    continue
                error = error_SRKH[s, r, k] / error_SRKH[s, r, k].square().mean().sqrt()
                expected[s, k] = rho * expected[s, k] + (1 - rho) * severity_SRK[s, r, k] * error
                cosine = torch.cosine_similarity(before_SRKX[s, r, k], error @ memory.sketch_HX, dim=0)
                faded = evidence[s, k] * memory.evidence_fade
                evidence[s, k] = faded + torch.stack((torch.ones(()), cosine, cosine.square()))
    memory.learn(error_SRKH, severity_SRK, before_SRKX, usable_SRK, time_SR)
    torch.testing.assert_close(memory.memory_SKH, expected)
    torch.testing.assert_close(memory.evidence_SK3, evidence)


def fed(memory: Memory, error_SRKH: torch.Tensor, severity: float = 1.0) -> None:
    """One entry of one root, proposed just before."""
    before_SRKX = memory.sketch()[:, None]
    shape = error_SRKH.shape[:-1]
    memory.learn(
        error_SRKH,
        torch.full(shape, severity),
        before_SRKX,
        torch.ones(shape, dtype=torch.bool),
        torch.zeros(shape[:2], dtype=torch.int64),
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_what_is_not_finite_teaches_nothing(bad: float) -> None:
    memory = one(2, 1)
    for _ in range(3):
        fed(memory, torch.ones(2, 1, 1, WIDTH))
    kept, evidence = memory.memory_SKH, memory.evidence_SK3
    error_SRKH = torch.ones(2, 1, 1, WIDTH)
    error_SRKH[0] = bad
    fed(memory, error_SRKH)
    assert torch.equal(memory.memory_SKH[0], kept[0]) and torch.equal(memory.evidence_SK3[0], evidence[0])
    assert memory.memory_SKH.isfinite().all() and not torch.equal(memory.memory_SKH[1], kept[1])
    fed(memory, torch.ones(2, 1, 1, WIDTH), severity=torch.nan)
    assert torch.equal(memory.memory_SKH[0], kept[0]) and memory.gate().isfinite().all()


def test_it_never_grows_beyond_one() -> None:
    memory = one(1, 1)
    for size in (1e-6, 1.0, 1e6) * 30:
        fed(memory, size * torch.ones(1, 1, 1, WIDTH))
    assert 0.99 < float(rms(memory.memory_SKH)) <= 1.0 + 1e-5


def test_errors_that_repeat_open_the_gate_soon_and_their_end_closes_it() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = one(50, 1)
    truth_H = torch.randn(WIDTH, generator=generator)

    def rounds(count: int, share: float) -> list[float]:
        opened = []
        for _ in range(count):
            fed(memory, share * truth_H + torch.randn(50, 1, 1, WIDTH, generator=generator))
            opened.append(float(memory.gate().mean()))
        return opened

    helped = rounds(40, share=1.0)
    assert max(helped[: int(ENOUGH)]) == 0 and helped[-1] > 0.9
    assert rounds(60, share=0.0)[-1] < 0.1


def test_a_gate_that_chance_opens_is_seldom_and_hardly_open() -> None:
    """Unrelated errors, 400 trajectories of 100: counted."""
    generator = torch.Generator().manual_seed(1)
    memory = one(400, 1)
    gates = []
    for _ in range(100):
        fed(memory, torch.randn(400, 1, 1, WIDTH, generator=generator))
        gates.append(memory.gate())
    gate_TS = torch.stack(gates).squeeze(-1)
    assert (gate_TS > 0).float().mean() < 0.03
    assert gate_TS.mean() < 0.005


def test_a_new_trajectory_starts_with_nothing() -> None:
    memory = one(2, 1)
    for _ in range(20):
        fed(memory, torch.ones(2, 1, 1, WIDTH))
    assert memory.gate().min() > 0
    memory.follow(torch.tensor([1, 0, 0]), torch.tensor([True, False, True]))
    assert memory.memory_SKH.any(-1).squeeze(-1).tolist() == [True, False, True]
    assert (memory.gate() > 0).squeeze(-1).tolist() == [True, False, True]
