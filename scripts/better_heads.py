"""Which heads pay? Fits variants alike on one policy's rollouts, and judges each by tokens per round and by its cost.

    python scripts/better_heads.py --model runs/warm --work runs/better_heads --json docs/results/better_heads.json

Rollouts are recorded once, with the states of a lower, a middle and a high layer beside the last one. Every variant has
the same updates, optimiser and data, and two seeds. Tokens per round are counted on responses that were held out, by
the same code as `specroll heads fit` does it; a proposal is timed with its noise, its corrections and its tree, in turns
with the others, in processor time of one thread (what else the machine does is then not counted). What is in the work
folder is not done again. GSM8K is read as `specroll heads fit --task gsm8k` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tried_heads import Beam, Lattice, LayerHeads, LayerProposer, PairHeads, PairProposer, Stepper

from specroll.bench.compare import order
from specroll.budget.calibrate import HitCalibrator
from specroll.build import build_engine
from specroll.cli.heads import Options, _collect, _requests
from specroll.cli.progress import Progress
from specroll.config import HeadsConfig, HeadsSee
from specroll.device import machine
from specroll.engine import Engine
from specroll.engine.measure import _passes
from specroll.files import write_atomic
from specroll.propose.fit import _Fit, adamw
from specroll.propose.heads import FutureHeads, rms_norm
from specroll.propose.judge import Judge
from specroll.propose.loss import Loss
from specroll.propose.proposer import HeadsProposer
from specroll.propose.samples import Samples, draft_vocabulary, split
from specroll.tree.grow import grow
from specroll.types import Draws, Features, Request, SamplingParams, Trajectory
from specroll.verify.walk import walk

LAYERS = (3, 15, 27)
"""Whose outputs are recorded, counted from 1."""
HELD_OUT, BATCH, LR = 0.2, 384, 1e-3
NODES = (8, 3)
"""Trees that are judged: the first teaches the calibration. 3 is about what the budget leaves each of 8 sequences."""
SETTLE = 1024
"""Positions that only settle the calibration, as a running rollout has."""
REPEATS, CONTEXT = 40, 128
RESAMPLES = 2000
RUNNING = (1, 8)


@dataclass(frozen=True)
class Fitted:
    """Heads to fit. `tokens`: a draft vocabulary of so many instead of the usual one."""

    heads: type[FutureHeads] = FutureHeads
    sees: HeadsSee = "path"
    tokens: int | None = None


FITS = {
    "path": Fitted(),
    "pairs": Fitted(PairHeads, "root"),
    "layers": Fitted(LayerHeads),
    "root": Fitted(sees="root"),
    "state": Fitted(sees="state"),
    "path 4500": Fitted(tokens=4500),
}
# By name: the fit, how it proposes, and a smaller draft vocabulary than it was fitted with.
Proposing = Callable[[FutureHeads, Any], Any]
WAYS: dict[str, tuple[str, Proposing, int | None]] = {
    "path": ("path", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
    "path, trees of 2 paths": ("path", lambda heads, model: Beam(Stepper(heads, model), 2), None),
    "path, trees of 4 paths": ("path", lambda heads, model: Beam(Stepper(heads, model), 4), None),
    "pairs": ("pairs", lambda heads, model: Lattice(PairProposer(heads, model)), None),
    "pairs, trees of 4 paths": ("pairs", lambda heads, model: Beam(PairProposer(heads, model), 4), None),
    "layers": ("layers", lambda heads, model: Lattice(LayerProposer(heads, model)), None),
    "root": ("root", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
    "state": ("state", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
    "path, 500 tokens": ("path", lambda heads, model: Lattice(HeadsProposer(heads, model)), 500),
    "path, 1000 tokens": ("path", lambda heads, model: Lattice(HeadsProposer(heads, model)), 1000),
    "path, 4500 tokens": ("path 4500", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
}


class Rollouts:
    """The policy's responses, those to learn from and those held out, as samples with and without further layers."""

    def __init__(self, engine: Engine, options: Options) -> None:
        requests = _requests(options, engine, "train", options.rollouts)
        with Progress() as progress:
            trajectories = _collect(options, engine, requests, options.output, progress)
        self.model: Any = engine.target.causal
        deep = _layer_states(self.model, requests, trajectories, options.output / "layers.safetensors")
        by_id = {id(t): state_TX for t, state_TX in zip(trajectories, deep, strict=True)}
        self.learn, self.held_out = split(trajectories, HELD_OUT, seed=0)
        learn_PX, held_PX = (torch.cat([by_id[id(t)] for t in part]).float() for part in (self.learn, self.held_out))
        mean_X, std_X = learn_PX.mean(0), learn_PX.std(0)
        self._deep = {"learn": (learn_PX - mean_X) / std_X, "held_out": (held_PX - mean_X) / std_X}
        self.settings = {"rollouts": len(trajectories), "tokens": sum(t.token_T.numel() for t in trajectories)}

    def samples(self, part: str, heads: FutureHeads) -> Samples:
        plain = Samples.of(getattr(self, part))
        if not isinstance(heads, LayerHeads):
            return plain
        return replace(plain, hidden_PH=torch.cat((plain.hidden_PH.float(), self._deep[part]), dim=1))

    def vocabulary(self, tokens: int | None) -> Tensor:
        """The draft vocabulary that a fit takes, or so many tokens, those that the laws expect most often."""
        if tokens is None:
            return draft_vocabulary(self.learn)
        token_N = torch.cat([t.top_token_TC.flatten() for t in self.learn])
        expected_V = torch.bincount(token_N, torch.cat([t.top_logp_TC.exp().flatten() for t in self.learn]).double())
        return expected_V.topk(min(tokens, int((expected_V > 0).sum()))).indices


@torch.no_grad()
def _layer_states(model: Any, requests: list[Request], trajectories: list[Trajectory], path: Path) -> list[Tensor]:
    """Of each response [T, X]: the states of `LAYERS`, each of RMS 1, that came with those that drew its tokens."""
    if not path.exists():
        found: dict[str, Tensor] = {}
        for i, (request, trajectory) in enumerate(zip(requests, trajectories, strict=True)):
            ids = torch.tensor([[*request.prompt_ids, *trajectory.token_T.tolist()]], device=model.device)
            states = model.get_decoder()(ids, use_cache=False, output_hidden_states=True).hidden_states
            drew = slice(len(request.prompt_ids) - 1, ids.shape[1] - 1)
            last_TH, recorded_TH = states[-1][0, drew].float(), trajectory.hidden_TH.float()
            if (last_TH - recorded_TH).norm() > 0.1 * recorded_TH.norm():
                raise ValueError(f"response {i} is not this model's: remove {path.parent} to sample anew")
            layers = [rms_norm(states[round(n * (len(states) - 1) / 30)][0, drew].float()) for n in LAYERS]
            found[f"{i:04d}"] = torch.cat(layers, dim=-1).to(torch.bfloat16)
        save_file(found, path)
    return list(dict(sorted(load_file(path).items())).values())


class Measured(Judge):
    """The judge of `specroll heads fit`, for any way to propose, at all held-out positions and by trajectory."""

    def __init__(self, rollouts: Rollouts, heads: FutureHeads) -> None:
        super().__init__(rollouts.model, rollouts.held_out)
        self.samples = rollouts.samples("held_out", heads)
        self.start_P = self.samples.starts()

    @torch.no_grad()
    def accepted(self, way: Any) -> dict[str, Any]:
        """Accepted nodes in all, by size of the tree and then by trajectory, and positions by trajectory."""
        proposer, every_P = way.proposer, self.start_P
        hits = HitCalibrator(proposer.horizons)
        accepted = {nodes: torch.zeros(self.samples.token_P.numel()) for nodes in NODES}
        for start_P, counts in ((every_P[:: -(-every_P.numel() // SETTLE)], False), (every_P, True)):
            for position_B, noise_BKV in self._ahead(proposer.heads, start_P):
                root_B, recall = self.samples.token_P[position_B], self._recall(proposer, position_B)
                draft = way.draft(self.samples.hidden_PH[position_B], root_B, noise_BKV, recall, hits)
                for nodes in NODES[: len(NODES) if counts else 1]:
                    tree = grow(draft, root_B, nodes)
                    verdict = walk(tree, self._draws(tree, position_B))
                    if nodes == NODES[0]:
                        way.learn(hits, draft, tree, verdict)
                    kept_N = (verdict.accepted_N & (tree.depth_N > 0)).float()
                    accepted[nodes].index_add_(0, position_B[tree.sequence_N], kept_N * counts)
        first = self.samples.first_P[every_P].unique()
        place_P = torch.searchsorted(first, self.samples.first_P)
        zero = torch.zeros(first.numel())
        return {
            "accepted": {nodes: zero.index_add(0, place_P, found_P).tolist() for nodes, found_P in accepted.items()},
            "positions": zero.index_add(0, place_P[every_P], torch.ones(every_P.numel())).tolist(),
        }

    def _draws(self, tree: Any, position_B: Tensor) -> Draws:
        """The tokens that were drawn behind each node, were it on the response's own path; -1 behind its end."""
        start_N = position_B[tree.sequence_N]
        drawn_N = (start_N + tree.depth_N + 1).clamp(max=self.samples.token_P.numel() - 1)
        token_N = self.samples.token_P[drawn_N].where(tree.depth_N < self.samples.left_P[start_N], -1)
        return Draws(token_N, *[torch.zeros(token_N.numel())] * 3)


def fitted(rollouts: Rollouts, name: str, seed: int, updates: int, folder: Path) -> tuple[FutureHeads, list[float]]:
    """Heads of that name, and their held-out KL by horizon, from the folder or fitted now."""
    spec, path = FITS[name], folder / f"{name}-{seed}.safetensors"
    vocabulary = rollouts.vocabulary(spec.tokens)
    config = HeadsConfig(sees=spec.sees)
    heads = spec.heads.for_model(rollouts.model, config, vocabulary=vocabulary, seed=seed)
    if not path.exists():
        began = time.monotonic()
        learn, judge = Samples.of(rollouts.learn), Measured(rollouts, heads)
        fitting = _Fit(heads, rollouts.model, learn, updates, BATCH, LR, seed, Loss(), adamw(heads))
        fitting.samples = rollouts.samples("learn", heads)
        fitting.start(judge, path.with_suffix(".part"))
        if (note := fitting.run(judge, path.with_suffix(".part"), None)) is not None:
            raise RuntimeError(f"{name}, seed {seed}: {note}")
        fitting.keep_best()
        heads.sharpness_K = judge.sharpness(heads)
        best = fitting.progress
        save_file(dict(heads.state_dict()) | {"kl_K": best.best_kl_K}, path)
        path.with_suffix(".part").unlink()
        print(f"{name}, seed {seed}: {time.monotonic() - began:.0f} s, update {best.best_update}, {best.best_kl_K}")
    state = load_file(path)
    kl_K = state.pop("kl_K").tolist()
    heads.load_state_dict(state)
    return heads, kl_K


def judged(rollouts: Rollouts, name: str, seed: int, updates: int, folder: Path) -> dict[str, Any]:
    """What a way to propose accepts on held-out responses, from the folder or counted now."""
    path = folder / f"{name}-{seed}.json"
    if not path.exists():
        of, proposing, tokens = WAYS[name]
        heads, kl_K = fitted(rollouts, of, seed, updates, folder)
        if tokens is not None:
            heads.use_vocabulary(rollouts.vocabulary(tokens))
        found = Measured(rollouts, heads).accepted(proposing(heads, rollouts.model))
        assert heads.vocabulary_V is not None
        found |= {
            "kl_K": kl_K,
            "draft_vocabulary": heads.vocabulary_V.numel(),
            "sharpness": float(heads.sharpness_K[0]),
        }
        found["parameters"] = sum(p.numel() for p in heads.parameters())
        write_atomic(path, json.dumps(found).encode())
        totals = {n: sum(a) / sum(found["positions"]) for n, a in found["accepted"].items()}
        print(f"{name}, seed {seed}: accepted {totals}")
    return json.loads(path.read_bytes())


@torch.no_grad()
def timed(engine: Engine, rollouts: Rollouts, updates: int, folder: Path) -> dict[str, dict[str, float]]:
    """Median milliseconds of each way's proposal, tree included, and of passes, by running sequences."""
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], object]] = {}
    for name, (of, proposing, tokens) in WAYS.items():
        heads, _ = fitted(rollouts, of, 0, updates, folder)
        if tokens is not None:
            heads.use_vocabulary(rollouts.vocabulary(tokens))
        way = proposing(heads, rollouts.model)
        for running in RUNNING:
            runs[f"{name}/{running}"] = partial(_propose, way, _features(heads, running))
    with engine.target.rolling_out():
        engine.target.reserve(max(RUNNING), 2 * CONTEXT)
        make = _passes(engine.target, SamplingParams(top_p=0.95))
        for running, nodes in _rounds():
            runs[f"pass of {nodes} nodes/{running}"] = partial(make, running, running * (1 + nodes), CONTEXT)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(-2, REPEATS):
            for name in order(list(runs), repeat):
                began = time.process_time()
                runs[name]()
                if repeat >= 0:
                    seconds[name].append(time.process_time() - began)
    found: dict[str, dict[str, float]] = {}
    for name, taken in seconds.items():
        what, running = name.split("/")
        found.setdefault(what, {})[running] = 1e3 * statistics.median(taken)
    return found


def _rounds() -> list[tuple[int, int]]:
    return [(1, NODES[0]), *((max(RUNNING), nodes) for nodes in NODES)]


def _features(heads: FutureHeads, running: int) -> Features:
    wide = heads.hidden_size * (1 + len(LAYERS) * isinstance(heads, LayerHeads))
    past = torch.arange(running * CONTEXT).view(running, -1) % heads.vocab_size
    position = torch.full((running,), CONTEXT - 1)
    hidden = torch.randn(running, wide, generator=torch.Generator().manual_seed(0))
    return Features(hidden, past[:, -1], torch.arange(running), position, SamplingParams(top_p=0.95), past)


def _propose(way: Any, features: Features) -> None:
    proposer = way.proposer
    noise_SKV, recall = proposer._noise(features), proposer.corrector.recall(features)
    draft = way.draft(features.hidden_SH, features.root_S, noise_SKV, recall, proposer.calibrator)
    grow(draft, features.root_S, NODES[0])


def summary(counts: dict[str, list[dict[str, Any]]], ms: dict[str, dict[str, float]]) -> dict[str, Any]:
    """By way: tokens per round of each seed and over those of the heads in use, cost, and what is left in tokens/s."""
    found = {}
    for name, seeds in counts.items():
        per_round = {n: [1 + sum(seed["accepted"][str(n)]) / sum(seed["positions"]) for seed in seeds] for n in NODES}
        base = {n: [1 + sum(s["accepted"][str(n)]) / sum(s["positions"]) for s in counts["path"]] for n in NODES}
        gain = {n: sum(per_round[n]) / sum(base[n]) for n in NODES}
        cost = {
            (running, n): (ms[f"pass of {n} nodes"][str(running)] + ms["path"][str(running)])
            / (ms[f"pass of {n} nodes"][str(running)] + ms[name][str(running)])
            for running, n in _rounds()
        }
        found[name] = {
            "draft_vocabulary": seeds[0]["draft_vocabulary"],
            "parameters": seeds[0]["parameters"],
            "sharpness": [seed["sharpness"] for seed in seeds],
            "kl_K": [seed["kl_K"] for seed in seeds],
            "tokens_per_round": per_round,
            "over_path": {n: _interval(seeds, counts["path"], n) for n in NODES},
            "propose_ms": ms[name],
            "tokens_per_second_over_path": {f"{r} x {n} nodes": gain[n] * cost[r, n] for r, n in _rounds()},
        }
    return found


def _interval(seeds: list[dict[str, Any]], base: list[dict[str, Any]], nodes: int) -> dict[str, float]:
    """Tokens per round more than the base's, both seeds together, with 95 % of resampled held-out responses."""
    more_XT = torch.tensor([seed["accepted"][str(nodes)] for seed in seeds])
    more_T = (more_XT - torch.tensor([seed["accepted"][str(nodes)] for seed in base])).mean(0)
    count_T = torch.tensor(seeds[0]["positions"])
    index_ZT = torch.randint(count_T.numel(), (RESAMPLES, count_T.numel()), generator=torch.Generator().manual_seed(0))
    low, high = (more_T[index_ZT].sum(1) / count_T[index_ZT].sum(1)).quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"mean": float(more_T.sum() / count_T.sum()), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is recorded and fitted")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("medium")  # fits alone multiply in float32, and bfloat16 is enough for them
    options = Options(model=args.model, output=args.work, task="gsm8k", top_p=0.95, rollouts=args.rollouts)
    engine = build_engine(options.model, dtype=options.dtype, max_running=options.max_running)
    rollouts = Rollouts(engine, options)
    folder = args.work / f"{args.updates}x{BATCH}"
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for seed in range(args.seeds):
        for name in WAYS:
            counts[name].append(judged(rollouts, name, seed, args.updates, folder))
    ms = timed(engine, rollouts, args.updates, folder)
    result = {
        "command": "python scripts/better_heads.py " + " ".join(sys.argv[1:]),
        "machine": machine(rollouts.model.device, rollouts.model.dtype),
        "settings": rollouts.settings
        | {
            "updates": args.updates,
            "batch_positions": BATCH,
            "seeds": args.seeds,
            "layers": LAYERS,
            "matmul": "medium",
        },
        "held_out": {"responses": len(rollouts.held_out), "positions": sum(counts["path"][0]["positions"])},
        "pass_ms": {name: by for name, by in ms.items() if name.startswith("pass")},
        "ways": summary(counts, ms),
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, way in result["ways"].items():
        print(name, way["tokens_per_round"], way["over_path"], way["propose_ms"], way["tokens_per_second_over_path"])


if __name__ == "__main__":
    main()
