"""Fitting on toy worlds: what can be learned is learned, what was interrupted goes on, what gets worse is undone."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from markov import VOCAB, markov_model, responses
from torch import Tensor
from transformers import LlamaForCausalLM

import specroll.propose.fit as fit_module
from specroll.config import HeadsConfig, HeadsSee
from specroll.propose.fit import FitProgress, FitReport, fit
from specroll.propose.heads import FutureHeads
from specroll.propose.judge import Judge
from specroll.propose.loss import Loss
from specroll.propose.proposer import HeadsProposer, add_noise
from specroll.propose.samples import Samples
from specroll.types import Trajectory


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return markov_model()


def world(count: int = 40, length: int = 30, seed: int = 0) -> list[Trajectory]:
    return responses(seed, 99, count=count, length=length)


def run(model: LlamaForCausalLM, heads: FutureHeads, **changes: object) -> FitReport:
    settings = {"updates": 60, "batch_positions": 128, "lr": 2e-2, "nodes": (1, 4), **changes}
    return fit(heads, model, world(), **settings)  # type: ignore[arg-type]


def heads_of(model: LlamaForCausalLM, *, sees: HeadsSee = "path") -> FutureHeads:
    config = HeadsConfig(horizons=2, sees=sees)
    return FutureHeads.for_model(model, config, vocabulary=torch.arange(14))


def test_the_path_teaches_the_second_horizon_what_the_root_cannot(model: LlamaForCausalLM) -> None:
    knowing, guessing = (run(model, heads_of(model, sees=sees)) for sees in ("path", "root"))
    assert knowing.kl_after_K[1] < 0.2 < guessing.kl_after_K[1]  # one step of the chain, or two
    assert knowing.accepted_after[4] > guessing.accepted_after[4]


def test_the_root_teaches_what_the_root_decides(model: LlamaForCausalLM) -> None:
    seeing, blind = heads_of(model), heads_of(model, sees="state")
    seen, unseen = run(model, seeing), run(model, blind)
    assert seen.kl_after_K[0] < 0.2 < 1.0 < unseen.kl_after_K[0]
    assert seen.kl_after_K[0] < seen.kl_before_K[0] - 1.0
    # One node at the law's mode hits with probability 0.8; untrained heads know nothing but what Reflex remembers.
    assert seen.accepted_before[1] < 0.5 < 0.6 < seen.accepted_after[1] <= 1.0
    assert seen.accepted_after[4] > seen.accepted_after[1] + 0.3
    assert seen.note is None and seen.updates == 60 and seen.kept_update > 0
    assert seen.held_out_trajectories == 4 and seen.draft_coverage == 1.0 and seen.draft_vocabulary == 14
    # A rollout starts from what was measured: one node of the law's mode is promised the 0.8 that it will bring.
    assert seeing.calibration_2PK is not None
    proposed = HeadsProposer(seeing, model, ranking="probability")
    torch.testing.assert_close(proposed.calibrator.coverage_PK, seeing.calibration_2PK[0])
    assert float(seeing.calibration_2PK[0, 0, 0]) > 0.6
    # The report is of the weights that are left in the heads.
    judge = Judge(model, [t for i, t in enumerate(world()) if i in _held_out()])
    torch.testing.assert_close(judge.kl(seeing), torch.tensor(seen.kl_after_K, dtype=torch.float64), rtol=0, atol=1e-6)


def _held_out() -> set[int]:
    return set(torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()[:4])


def test_only_the_heads_move(model: LlamaForCausalLM) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, heads_of(model), updates=3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_pass_shows_every_position_once_in_a_new_order(model: LlamaForCausalLM) -> None:
    samples = Samples.of(world(3))
    heads = heads_of(model)
    fitting = fit_module._Fit(heads, model, samples, 6, 29, 1e-3, 5, Loss(), fit_module.adamw(heads))
    passes = [torch.cat([fitting._batch(update) for update in range(first, first + 3)]) for first in (0, 3)]
    assert all(torch.equal(seen.sort().values, samples.starts()) for seen in passes)
    assert not torch.equal(*passes)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 23, 40])
def test_an_interrupted_fit_ends_like_an_uninterrupted_one(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    monkeypatch.setattr(fit_module, "SAVE_SECONDS", -1.0)
    whole, halved = heads_of(model), heads_of(model)
    report = run(model, whole, updates=40)

    def interrupt(progress: FitProgress) -> None:
        if progress.update == stop_at:
            raise Interrupted

    checkpoint = tmp_path / "fit.safetensors"
    with pytest.raises(Interrupted):
        run(model, halved, updates=40, checkpoint=checkpoint, on_progress=interrupt)
    resumed = heads_of(model)  # as a new process would
    seen: list[FitProgress] = []
    again = run(model, resumed, updates=40, checkpoint=checkpoint, on_progress=seen.append)
    assert [p.update for p in seen] == list(range(stop_at + 1, 41))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    for name in ("updates", "kl_before_K", "kl_after_K", "accepted_after", "kept_update"):
        assert getattr(again, name) == getattr(report, name), name
    assert [p.name for p in tmp_path.iterdir()] == ["fit.safetensors"]


def test_a_checkpoint_of_another_fit_or_a_damaged_one_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    checkpoint = tmp_path / "folder" / "fit.safetensors"
    run(model, heads_of(model), updates=2, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"another fit: lr, updates differ; delete it"):
        run(model, heads_of(model), updates=3, lr=0.5, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"another fit: positions, tokens differ"):
        fit(heads_of(model), model, world(30), updates=2, batch_positions=128, lr=2e-2, checkpoint=checkpoint)
    payload = checkpoint.read_bytes()
    for damaged in (b"", payload[:100], payload[:-5], b"\xff" * 64):
        checkpoint.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a usable checkpoint"):
            run(model, heads_of(model), updates=2, checkpoint=checkpoint)


def test_a_fit_that_makes_things_worse_is_undone(model: LlamaForCausalLM) -> None:
    heads = heads_of(model)
    run(model, heads)
    good = [parameter.detach().clone() for parameter in heads.parameters()]
    report = run(model, heads, updates=6, lr=3.0, seed=0)
    assert report.note is not None and "held-out" in report.note
    assert report.kept_update == 0 and report.kl_after_K == report.kl_before_K
    assert all(torch.equal(kept, before) for kept, before in zip(heads.parameters(), good, strict=True))


def test_a_loss_that_is_not_finite_leaves_the_weights_before(model: LlamaForCausalLM) -> None:
    trajectories = world()
    learned = next(i for i in range(40) if i not in _held_out())
    trajectories[learned].hidden_TH[3] = torch.nan
    heads = heads_of(model)
    before = [parameter.detach().clone() for parameter in heads.parameters()]
    report = fit(heads, model, trajectories, updates=50, batch_positions=2000, nodes=(1,))
    assert report.note is not None and "not finite at update 1" in report.note
    assert all(torch.equal(a, b) for a, b in zip(before, heads.parameters(), strict=True))


def test_full_vocabulary_and_nothing_held_out(model: LlamaForCausalLM) -> None:
    heads = FutureHeads.for_model(model, HeadsConfig(horizons=2))
    report = run(model, heads, held_out=0.0)
    assert report.draft_vocabulary is None and report.held_out_trajectories == 0
    assert report.kl_after_K[0] < 0.3


def test_what_no_held_out_response_can_judge_keeps_what_it_learned(model: LlamaForCausalLM) -> None:
    """A horizon that they do not reach has no say; where none can be judged, the last weights are kept."""
    trajectories = [
        Trajectory(t.hidden_TH[:2], t.token_T[:2], t.top_token_TC[:2], t.top_logp_TC[:2]) if i in _held_out() else t
        for i, t in enumerate(world())
    ]
    heads = heads_of(model)
    report = fit(heads, model, trajectories, updates=10, batch_positions=128, lr=1e-2, nodes=(1,))
    assert report.kept_update > 0 and report.note is None and bool(heads.second_BHF.any())


def test_bad_settings_are_refused(model: LlamaForCausalLM) -> None:
    for bad in ({"updates": 0}, {"batch_positions": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"held_out": 1.0}):
        with pytest.raises(ValueError, match="got"):
            run(model, heads_of(model), **bad)
    with pytest.raises(ValueError, match="sample longer responses"):
        fit(heads_of(model), model, world(3, length=1))
    with pytest.raises(ValueError, match="width 16, the heads 8"):
        fit(FutureHeads(8, VOCAB), model, world(3))


@pytest.mark.parametrize(("others", "expected"), [(0, {1.0}), (6, {1.25, 1.5, 1.75, 2.0})])
def test_heads_that_know_only_a_mean_of_laws_are_sharpened(
    model: LlamaForCausalLM, others: int, expected: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that know the very law already find the drawn token, and any factor would make them miss it."""
    generator = torch.Generator().manual_seed(3)
    trajectories = []
    for _ in range(40):
        law_TV = torch.softmax(3 * torch.randn(60, 12, generator=generator), -1)
        law_TV = law_TV * (law_TV > 0.03)  # truncated, as by top-p
        drawn_T = torch.multinomial(law_TV, 1, generator=generator).squeeze(1)
        law_TV = law_TV / law_TV.sum(-1, keepdim=True)
        trajectories.append(Trajectory(torch.zeros(60, 16), drawn_T, torch.arange(12).expand(60, -1), law_TV.log()))
    heads, judge = heads_of(model), Judge(model, trajectories, reflex="off")
    law_PV = judge.samples.top_logp_PC.exp()
    mean_PV = sum((law_PV[torch.randperm(len(law_PV), generator=generator)] for _ in range(others)), law_PV)
    logits_PV = torch.nn.functional.pad((mean_PV / (others + 1)).clamp(min=1e-9).log(), (0, 2), value=-30.0)

    def drafts(self: Judge, proposer: HeadsProposer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for at_B, noise_BKV in self._ahead(proposer.heads, self.start_P):
            best = add_noise(self._logits(proposer.heads, at_B), noise_BKV, proposer.heads.sharpness_K).topk(12)
            yield at_B, best.indices, best.values

    monkeypatch.setattr(Judge, "_logits", lambda self, _, at_B: logits_PV[self.samples.ahead(at_B, 2)[0]])
    monkeypatch.setattr(Judge, "_drafts", drafts)
    chosen = judge.sharpness(heads)
    assert set(chosen.tolist()) <= expected
    if others:
        before = judge.acceptance(heads, (4,))
        heads.sharpness_K = chosen
        assert judge.acceptance(heads, (4,))[4] > before[4]


def test_the_loss_pulls_towards_drawn_tokens_and_the_weights_before(model: LlamaForCausalLM) -> None:
    judge = Judge(model, world(seed=5))

    def lied(trajectory: Trajectory) -> Trajectory:  # laws that say nothing: only the drawn tokens can teach
        even_TC = torch.full_like(trajectory.top_logp_TC, 1 / 12).log()
        return Trajectory(trajectory.hidden_TH, trajectory.token_T, trajectory.top_token_TC, even_TC)

    likelihood, moved = {}, {}
    for name, loss in (("laws", Loss()), ("tokens", Loss(token=4.0)), ("held", Loss(token=4.0, proximal=1.0))):
        heads = heads_of(model)
        before = [parameter.detach().clone() for parameter in heads.parameters()]
        taught = [lied(t) for t in world()]
        fit(heads, model, taught, updates=40, batch_positions=128, lr=5e-3, loss=loss, held_out=world(seed=5))
        likelihood[name] = -float(judge.losses(heads)[1, 0])
        moved[name] = sum(
            float((p.detach() - b).square().sum()) for p, b in zip(heads.parameters(), before, strict=True)
        )
    assert likelihood["tokens"] > likelihood["laws"] + 0.3
    assert 0 < moved["held"] < 0.5 * moved["tokens"]


def test_chosen_responses_judge_and_an_optimiser_goes_on(model: LlamaForCausalLM) -> None:
    heads, others = heads_of(model), world(seed=5)
    optimizer = fit_module.adamw(heads)
    report = run(model, heads, updates=5, held_out=others, optimizer=optimizer)
    assert report.held_out_trajectories == 40 and report.positions == 40 * 29
    torch.testing.assert_close(
        Judge(model, others).kl(heads), torch.tensor(report.kl_after_K, dtype=torch.float64), rtol=0, atol=1e-6
    )
    assert report.drawn_after_K == pytest.approx(Judge(model, others).losses(heads)[1].tolist(), abs=1e-6)
    assert all(after < before for after, before in zip(report.drawn_after_K, report.drawn_before_K, strict=True))
    run(model, heads, updates=5, held_out=others, optimizer=optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {10.0}


def test_records_tell_hits_and_regret_of_each_horizon(model: LlamaForCausalLM) -> None:
    heads, judge = heads_of(model), Judge(model, world(seed=5), reflex="off")
    before = judge.records(heads)
    run(model, heads)
    after = judge.records(heads)
    for records in (before, after):
        assert records.hit_PK.shape == records.regret_PK.shape == records.exists_PK.shape == (1024, 2)
        assert records.trajectory_P.unique().numel() == 40
        exists_P = records.exists_PK[:, 1]
        assert bool((records.regret_PK[exists_P] > -1e-6).all()) and not bool(records.hit_PK[~exists_P, 1].any())
    exists_P = after.exists_PK[:, 1]
    assert bool((after.hit_PK[exists_P].float().mean(0) > before.hit_PK[exists_P].float().mean(0) + 0.2).all())
    assert bool((after.regret_PK[exists_P].mean(0) < 0.1).all())
    # Four of twelve equally unlikely tokens, and the likely one among them or not.
    assert bool((before.regret_PK[exists_P].mean(0) > 0.3).all())


@pytest.mark.parametrize("judgements", [1, 3])
def test_held_out_responses_are_looked_at_as_often_as_was_asked_for(
    model: LlamaForCausalLM, judgements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = Judge.losses
    monkeypatch.setattr(Judge, "losses", lambda self, heads: looks.append(1) or real(self, heads))
    report = run(model, heads_of(model), updates=9, judgements=judgements)
    assert len(looks) == 1 + judgements and report.kept_update == 9


def test_both_losses_are_those_of_each_alone(model: LlamaForCausalLM) -> None:
    """Of laws that leave no doubt, both are the same; of others, the drawn tokens' is higher by about the entropy."""
    heads = heads_of(model)
    run(model, heads)

    def certain(trajectory: Trajectory) -> Trajectory:
        sure_TC = torch.where(trajectory.top_token_TC == trajectory.token_T[:, None], 0.0, -torch.inf)
        return Trajectory(trajectory.hidden_TH, trajectory.token_T, trajectory.top_token_TC, sure_TC)

    law_K, drawn_K = Judge(model, [certain(t) for t in world(seed=5)]).losses(heads)
    torch.testing.assert_close(law_K, drawn_K)
    kl_K, same_K = Judge(model, world(seed=5)).losses(heads)
    torch.testing.assert_close(same_K, drawn_K)
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2 / 11))
    assert (drawn_K - kl_K).tolist() == pytest.approx([entropy] * 2, abs=0.3)


def test_products_in_the_models_own_dtype_teach_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has units for them. What is stored, and what is stepped, stays float32."""
    model = markov_model().bfloat16()
    real, kls = torch.nn.functional.linear, {}
    for units in (False, True):
        made: set[torch.dtype] = set()

        def linear(*given: Tensor, made: set[torch.dtype] = made) -> Tensor:
            product = real(*given)
            made.add(product.dtype)
            return product

        heads = heads_of(model)
        with monkeypatch.context() as patched:  # so that all products are those of updates
            patched.setattr(fit_module, "multiplies_bfloat16", lambda device, units=units: units)
            patched.setattr(Judge, "losses", lambda self, heads: torch.full((2, 2), torch.nan))
            patched.setattr(Judge, "acceptance", lambda self, heads, nodes, **_: dict.fromkeys(nodes, 0.0))
            patched.setattr(Judge, "sharpness", lambda self, heads: heads.sharpness_K)
            patched.setattr(torch.nn.functional, "linear", linear)
            run(model, heads)
        assert made == {torch.bfloat16 if units else torch.float32}
        assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
        kls[units] = Judge(model, world(seed=5)).kl(heads)
    assert float(kls[True][0]) < 0.2 and float((kls[True] - kls[False]).abs().max()) < 0.03
