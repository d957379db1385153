"""What variants of heads are measured with: a policy's rollouts, tokens per round on held-out ones, and the clock.

P  positions    B  positions of a chunk    K  horizons    V  draft vocabulary    N  packed tree tokens
S  sequences    T  tokens of a response    H  hidden width    X  states of several layers, side by side
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tried_heads import LayerHeads

from specroll.bench.compare import order
from specroll.budget.calibrate import HitCalibrator
from specroll.cli.fit import collect_samples, to_sample
from specroll.cli.heads import Options
from specroll.cli.progress import Progress
from specroll.engine import Engine
from specroll.engine.measure import _passes
from specroll.propose.heads import FutureHeads, rms_norm
from specroll.propose.judge import Judge
from specroll.propose.samples import Samples, draft_vocabulary, split
from specroll.tree.grow import grow
from specroll.types import Draws, Features, Request, SamplingParams, Trajectory, Tree
from specroll.verify.walk import walk

LAYERS = (3, 15, 27)
"""Whose outputs are recorded, counted from 1, in a model of 30; elsewhere as far up."""
HELD_OUT = 0.2
NODES = (8, 3)
"""Trees that are judged: the first teaches the calibration. 3 is about what the budget leaves each of 8 sequences."""
RUNNING = (1, 8)
SETTLE = 1024
"""Positions that only settle the calibration, as a running rollout has."""
REPEATS, CONTEXT = 40, 128


class Rollouts:
    """The policy's responses, those to learn from and those held out, as samples with and without further layers."""

    def __init__(self, engine: Engine, options: Options) -> None:
        requests = to_sample(options, engine)
        with Progress() as progress:
            trajectories = collect_samples(options, engine, requests, progress)
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
    """The judge of `specroll heads fit`, for any way to propose, at half of the positions and by trajectory."""

    def __init__(self, rollouts: Rollouts, heads: FutureHeads) -> None:
        super().__init__(rollouts.model, rollouts.held_out)
        self.samples = rollouts.samples("held_out", heads)
        self.start_P = self.samples.starts()[::2]  # neighbours tell much the same

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
        place_P = torch.searchsorted(first, self.samples.first_P).clamp(max=first.numel() - 1)
        zero = torch.zeros(first.numel())
        return {
            "accepted": {nodes: zero.index_add(0, place_P, found_P).tolist() for nodes, found_P in accepted.items()},
            "positions": zero.index_add(0, place_P[every_P], torch.ones(every_P.numel())).tolist(),
        }

    def _draws(self, tree: Tree, position_B: Tensor) -> Draws:
        """The tokens that were drawn behind each node, were it on the response's own path; -1 behind its end."""
        start_N = position_B[tree.sequence_N]
        drawn_N = (start_N + tree.depth_N + 1).clamp(max=self.samples.token_P.numel() - 1)
        token_N = self.samples.token_P[drawn_N].where(tree.depth_N < self.samples.left_P[start_N], -1)
        return Draws(token_N, *[torch.zeros(token_N.numel())] * 3)


@torch.no_grad()
def timed(engine: Engine, ways: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Median milliseconds of each way's proposal, tree included, and of passes, by running sequences."""
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], object]] = {
        f"{name}/{running}": partial(_propose, way, _features(way.proposer.heads, running))
        for name, way in ways.items()
        for running in RUNNING
    }
    with engine.target.rolling_out():
        engine.target.reserve(max(RUNNING), 2 * CONTEXT)
        make = _passes(engine.target, SamplingParams(top_p=0.95))
        for running, nodes in rounds():
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


def rounds() -> list[tuple[int, int]]:
    """Running sequences and nodes of each, by which costs are weighed."""
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
