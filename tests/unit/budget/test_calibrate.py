"""Calibration against worlds whose truth is known."""

import pytest
import torch
from torch import Tensor

from specroll.budget.calibrate import COVERAGE_RANGE, HitCalibrator
from specroll.tree.grow import grow
from specroll.types import Draft, Draws, Tree, Verdict
from specroll.verify.walk import walk

COVERAGE = torch.tensor([0.8, 0.45, 0.2])
BETA = torch.tensor([1.0, 0.5, 0.25])


class World:
    """Scores as proposals have them, and draws that follow hit = coverage * softmax(beta * score) exactly."""

    def __init__(self, seed: int = 0, spread: float = 2.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.spread = spread

    def scores(self, rows: int) -> Tensor:
        """Best first, with an arbitrary offset per row, as unnormalised scores have."""
        score_NC = torch.randn(rows, 12, generator=self.generator) * self.spread
        return score_NC.sort(-1, descending=True).values + torch.randn(rows, 1, generator=self.generator) * 20

    def matches(self, score_NC: Tensor, horizon_N: Tensor) -> Tensor:
        share_NC = torch.softmax(score_NC * BETA[horizon_N, None], -1)
        drawn_N1 = torch.multinomial(share_NC, 1, generator=self.generator)
        covered_N = torch.rand(len(score_NC), generator=self.generator) < COVERAGE[horizon_N]
        return torch.zeros_like(share_NC).scatter_(1, drawn_N1, 1.0).bool() & covered_N[:, None]

    def teach(self, calibrator: HitCalibrator, rounds: int, rows: int = 24) -> None:
        for _ in range(rounds):
            horizon_N = torch.arange(rows) % 3
            score_NC = self.scores(rows)
            calibrator.update(
                score_NC, self.matches(score_NC, horizon_N), horizon_N, torch.ones(rows, dtype=torch.bool)
            )


def test_the_truth_is_recovered_and_predictions_come_true() -> None:
    world, calibrator = World(), HitCalibrator(3)
    world.teach(calibrator, rounds=250)
    torch.testing.assert_close(calibrator.coverage_PK[0], COVERAGE, rtol=0, atol=0.06)
    torch.testing.assert_close(calibrator.beta_PK[0], BETA, rtol=0.25, atol=0.0)
    again = HitCalibrator(3, measured_2PK=calibrator.estimate_2PK)
    some = world.scores(12).view(4, 3, -1)
    for mine, theirs in zip(again.hit(some), calibrator.hit(some), strict=True):
        torch.testing.assert_close(mine, theirs)
    # Reliability: among candidates predicted to hit with probability near p, a share of p does.
    rows, horizons = 30_000, 3
    score_NKC = world.scores(rows * horizons).view(rows, horizons, -1)
    hit_NKC, _ = calibrator.hit(score_NKC)
    match_NKC = torch.stack(
        [world.matches(score_NKC[:, k], torch.full((rows,), k)) for k in range(horizons)], 1
    ).float()
    for low, high in ((0.0, 0.05), (0.05, 0.15), (0.15, 0.4), (0.4, 1.0)):
        inside = (hit_NKC >= low) & (hit_NKC < high)
        assert abs(hit_NKC[inside].mean() - match_NKC[inside].mean()) < 0.03, (low, high)
    for k in range(horizons):
        assert abs(hit_NKC[:, k].sum(-1).mean() - match_NKC[:, k].sum(-1).mean()) < 0.05
        assert abs(hit_NKC[:, k, 0].mean() - match_NKC[:, k, 0].mean()) < 0.03  # the first candidate


def test_it_follows_a_change_and_faster_after_forgetting() -> None:
    def never(calibrator: HitCalibrator, world: World) -> None:
        for _ in range(3):
            score_NC = world.scores(24)
            calibrator.update(
                score_NC, torch.zeros(24, 12, dtype=torch.bool), torch.zeros(24, dtype=torch.int64), every
            )

    every = torch.ones(24, dtype=torch.bool)
    steady, forgetful = HitCalibrator(3), HitCalibrator(3)
    World(1).teach(steady, rounds=100)
    World(1).teach(forgetful, rounds=100)
    before = forgetful.coverage_PK.clone()
    forgetful.forget()
    torch.testing.assert_close(forgetful.coverage_PK, before)
    never(steady, World(2))
    never(forgetful, World(2))
    assert forgetful.coverage_PK[0, 0] < steady.coverage_PK[0, 0] - 0.1
    for _ in range(200):
        forgetful.forget()  # without evidence in between, as when nothing is proposed
    assert forgetful.coverage_PK.isfinite().all() and forgetful.tried_PK.min() > 0.5
    for _ in range(100):
        never(steady, World(3))
    assert steady.coverage_PK[0, 0] < 0.02


def test_untrained_heads_start_pessimistic() -> None:
    assert (HitCalibrator(6, trained=False).coverage_PK < HitCalibrator(6).coverage_PK / 1.5).all()


def test_only_visited_nodes_with_a_horizon_left_count() -> None:
    """Two sequences, two horizons: one path is right to the bottom, the other fails at the root."""
    draft = Draft(
        token_SKC=torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        score_SKC=torch.tensor([[[2.0, 1.0], [2.0, 1.0]]]).expand(2, 2, 2),
        hit_SKC=torch.tensor([[[0.6, 0.1], [0.5, 0.1]]]).expand(2, 2, 2),
    )
    tree = grow(draft, torch.tensor([90, 91]), 2)
    assert tree.token_N.tolist() == [90, 1, 3, 91, 5, 7]
    token_N = torch.tensor([1, 3, 99, 99, 7, 99])  # the third is drawn below the last horizon, the fifth off the path
    zeros_N = torch.zeros(6)
    verdict = walk(tree, Draws(token_N, zeros_N, zeros_N, zeros_N))
    assert verdict.accepted_N.tolist() == [True, True, True, True, False, False]
    calibrator = HitCalibrator(2)
    tried_PK, covered_PK = calibrator.tried_PK.clone(), calibrator.covered_PK.clone()
    calibrator.observe(draft, tree, verdict)
    torch.testing.assert_close(calibrator.tried_PK - tried_PK, torch.tensor([[2.0, 1.0], [0.0, 0.0]]), rtol=0, atol=0.1)
    torch.testing.assert_close(
        calibrator.covered_PK - covered_PK, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), rtol=0, atol=0.1
    )


def test_what_happens_aside_from_the_best_path_counts_aside() -> None:
    """The draws follow the second candidate of the first horizon, and then the first of the next."""
    draft = Draft(
        token_SKC=torch.tensor([[[1, 2], [3, 4], [5, 6]]]),
        score_SKC=torch.tensor([[[2.0, 1.0]] * 3]),
        hit_SKC=torch.tensor([[[0.5, 0.4], [0.6, 0.1], [0.6, 0.1]]]),
    )
    tree = grow(draft, torch.tensor([90]), 7)
    path = [0]
    for token in (2, 3):
        path.append(next(i for i in range(8) if int(tree.token_N[i]) == token and int(tree.parent_N[i]) == path[-1]))
    token_N = torch.full((8,), 99)
    token_N[path[0]], token_N[path[1]] = 2, 3
    zeros_N = torch.zeros(8)
    verdict = walk(tree, Draws(token_N, zeros_N, zeros_N, zeros_N))
    assert verdict.accepted_N.nonzero().flatten().tolist() == path
    calibrator = HitCalibrator(3)
    tried_PK, covered_PK = calibrator.tried_PK.clone(), calibrator.covered_PK.clone()
    calibrator.observe(draft, tree, verdict)
    seen = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])  # the third draw is missed
    torch.testing.assert_close(calibrator.tried_PK - tried_PK, seen, rtol=0, atol=0.1)
    hit = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(calibrator.covered_PK - covered_PK, hit, rtol=0, atol=0.1)
    for _ in range(200):
        calibrator.observe(draft, tree, verdict)
    along, aside = calibrator.hit(draft.score_SKC)
    assert aside[0, 2].sum() < 0.1 * along[0, 2].sum() and (aside <= along).all()


def test_a_draw_counts_as_covered_though_the_tree_did_not_try_it() -> None:
    draft = Draft(torch.tensor([[[1, 2, 3]]]), torch.tensor([[[2.0, 1.0, 0.0]]]), torch.tensor([[[0.6, 0.1, 0.05]]]))
    root = torch.tensor([90])
    zero = torch.zeros(1)
    calibrator = HitCalibrator(1)
    before = calibrator.coverage_PK.clone()
    tree: Tree = grow(draft, root, 0)
    calibrator.observe(draft, tree, Verdict(Draws(torch.tensor([3]), zero, zero, zero), torch.tensor([True])))
    assert calibrator.coverage_PK[0] > before[0] and calibrator.beta_PK[0] < 1 / 1.5  # covered, by an unlikely one


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_do_no_harm(bad: float) -> None:
    calibrator = HitCalibrator(3)
    World().teach(calibrator, rounds=20)
    rows = torch.ones(3, dtype=torch.bool)
    before = calibrator.state_dict()
    all_bad_NC = torch.full((3, 4), bad)
    match_NC = torch.tensor([[True, False, False, False]]).expand(3, 4)
    calibrator.update(all_bad_NC, match_NC, torch.arange(3), rows)
    assert all(torch.equal(before[name], value) for name, value in calibrator.state_dict().items())
    assert all(torch.equal(hit, torch.zeros(1, 3, 4)) for hit in calibrator.hit(all_bad_NC[None]))
    one_bad_NC = torch.tensor([[3.0, 1.0, bad, 0.5]]).expand(3, 4)
    for _ in range(50):
        calibrator.update(one_bad_NC, match_NC.roll(2, 1), torch.arange(3), rows)
    assert all(value.isfinite().all() for value in calibrator.state_dict().values())
    hit_KC = calibrator.hit(one_bad_NC[None])[0][0]
    assert (hit_KC[:, 2] == 0).all() and hit_KC.isfinite().all() and (hit_KC.sum(-1) <= 1).all()


def test_estimates_stay_in_bounds_whatever_happens() -> None:
    best, worst = HitCalibrator(1), HitCalibrator(1)
    horizon_N, every = torch.zeros(50, dtype=torch.int64), torch.ones(50, dtype=torch.bool)
    score_NC = torch.tensor([[1e4, 5.0, 0.0, -1e4]]).expand(50, 4)
    for _ in range(200):
        best.update(score_NC, torch.tensor([[True, False, False, False]]).expand(50, 4), horizon_N, every)
        worst.update(score_NC, torch.tensor([[False, False, False, True]]).expand(50, 4), horizon_N, every)
    for calibrator in (best, worst):
        assert 0.02 - 1e-6 <= float(calibrator.beta_PK[0]) <= 8.0 + 1e-6
        assert COVERAGE_RANGE[0] <= float(calibrator.coverage_PK[0]) <= COVERAGE_RANGE[1] + 1e-6
        assert all(hit.isfinite().all() for hit in calibrator.hit(score_NC[None, :1]))
    assert float(worst.beta_PK[0]) == pytest.approx(0.02)


def test_state_survives_a_round_trip_and_damage_is_refused() -> None:
    calibrator, other = HitCalibrator(3), HitCalibrator(3)
    World().teach(calibrator, rounds=5)
    other.load_state_dict(calibrator.state_dict())
    score_SKC = World(5).scores(3)[None]
    assert all(map(torch.equal, other.hit(score_SKC), calibrator.hit(score_SKC)))
    with pytest.raises(ValueError, match="for 2 horizons"):
        HitCalibrator(2).load_state_dict(calibrator.state_dict())
    with pytest.raises(ValueError, match="no usable beta_PK"):
        other.load_state_dict({**calibrator.state_dict(), "beta_PK": torch.full((2, 3), float("nan"))})
