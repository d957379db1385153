"""Which heads pay? Fits variants alike on one policy's rollouts, and judges each by tokens per round and by its cost.

    python scripts/better_heads.py --model runs/warm --work runs/better_heads --json docs/results/better_heads.json

Rollouts are recorded once, with the states of a lower, a middle and a high layer beside the last one. Every variant has
the same updates, optimiser and data, and two seeds. Tokens per round are counted on responses that were held out, by
the same code as `specroll heads fit` does it; a proposal is timed with its noise, corrections and tree, in turns with
the others, in processor time of one thread (what else the machine does is then not counted). What is in the work
folder is not done again. GSM8K is read as `specroll heads fit --task gsm8k` does.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from judge_heads import LAYERS, NODES, Measured, Rollouts, rounds, timed
from safetensors.torch import load_file, save_file
from tried_heads import Beam, Lattice, LayerHeads, LayerProposer, PairHeads, PairProposer, Stepper

from specroll.build import build_engine
from specroll.cli.heads import Options
from specroll.config import HeadsConfig, HeadsSee
from specroll.device import machine
from specroll.files import write_atomic
from specroll.propose.fit import _Fit, adamw
from specroll.propose.heads import FutureHeads
from specroll.propose.loss import Loss
from specroll.propose.proposer import HeadsProposer
from specroll.propose.samples import Samples

BATCH, LR = 384, 1e-3
RESAMPLES = 2000


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
    "4500 tokens": Fitted(tokens=4500),
}
# By name: the fit, how it proposes, and a smaller draft vocabulary than it was fitted with.
Proposing = Callable[[FutureHeads, Any], Any]
WAYS: dict[str, tuple[str, Proposing, int | None]] = {
    "path": ("path", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
    "path, trees of 2 paths": ("path", lambda heads, model: Beam(Stepper(heads, model), 2), None),
    "path, trees of 4 paths": ("path", lambda heads, model: Beam(Stepper(heads, model), 4), None),
    "layers": ("layers", lambda heads, model: Lattice(LayerProposer(heads, model)), None),
    "pairs": ("pairs", lambda heads, model: Lattice(PairProposer(heads, model)), None),
    "pairs, trees of 4 paths": ("pairs", lambda heads, model: Beam(PairProposer(heads, model), 4), None),
    "root": ("root", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
    "path, 500 tokens": ("path", lambda heads, model: Lattice(HeadsProposer(heads, model)), 500),
    "path, 1000 tokens": ("path", lambda heads, model: Lattice(HeadsProposer(heads, model)), 1000),
    "path, 4500 tokens": ("4500 tokens", lambda heads, model: Lattice(HeadsProposer(heads, model)), None),
}


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
        save_file(dict(heads.state_dict()) | {"kl_K": best.best_2K[0]}, path)
        path.with_suffix(".part").unlink()
        told = f"{time.monotonic() - began:.0f} s, best at update {best.best_update}, KL {best.best_2K[0].tolist()}"
        print(f"{name}, seed {seed}: {told}", flush=True)
    state = load_file(path)
    kl_K = state.pop("kl_K").tolist()
    heads.load_state_dict(state)
    return heads, kl_K


def way_of(rollouts: Rollouts, name: str, seed: int, updates: int, folder: Path) -> tuple[Any, list[float]]:
    """A way to propose with its fitted heads, and their held-out KL by horizon."""
    of, proposing, tokens = WAYS[name]
    heads, kl_K = fitted(rollouts, of, seed, updates, folder)
    if tokens is not None:
        heads.use_vocabulary(rollouts.vocabulary(tokens))
    return proposing(heads, rollouts.model), kl_K


def judged(rollouts: Rollouts, name: str, seed: int, updates: int, folder: Path) -> dict[str, Any]:
    """What a way to propose accepts on held-out responses, from the folder or counted now."""
    path = folder / f"{name}-{seed}.json"
    if not path.exists():
        way, kl_K = way_of(rollouts, name, seed, updates, folder)
        heads: FutureHeads = way.proposer.heads
        assert heads.vocabulary_V is not None
        found = Measured(rollouts, heads).accepted(way) | {
            "kl_K": kl_K,
            "draft_vocabulary": heads.vocabulary_V.numel(),
            "sharpness": float(heads.sharpness_K[0]),
            "parameters": sum(p.numel() for p in heads.parameters()),
        }
        write_atomic(path, json.dumps(found).encode())
        totals = {n: sum(a) / sum(found["positions"]) for n, a in found["accepted"].items()}
        print(f"{name}, seed {seed}: accepted {totals}", flush=True)
    return json.loads(path.read_bytes())


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
            for running, n in rounds()
        }
        found[name] = {
            "draft_vocabulary": seeds[0]["draft_vocabulary"],
            "parameters": seeds[0]["parameters"],
            "sharpness": [seed["sharpness"] for seed in seeds],
            "kl_K": [seed["kl_K"] for seed in seeds],
            "tokens_per_round": per_round,
            "over_path": {n: _interval(seeds, counts["path"], n) for n in NODES},
            "propose_ms": ms[name],
            "tokens_per_second_over_path": {f"{r} x {n} nodes": gain[n] * cost[r, n] for r, n in rounds()},
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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="some of them, path included")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("medium")  # fits alone multiply in float32, and bfloat16 is enough for them
    options = Options(model=args.model, output=args.work, task="gsm8k", top_p=0.95, rollouts=args.rollouts)
    engine = build_engine(options.model, dtype=options.dtype, max_running=options.max_running)
    rollouts = Rollouts(engine, options)
    folder = args.work / f"{args.updates}x{BATCH}"
    folder.mkdir(parents=True, exist_ok=True)
    counts = {
        name: [judged(rollouts, name, seed, args.updates, folder) for seed in range(args.seeds)] for name in args.ways
    }
    ms = timed(engine, {name: way_of(rollouts, name, 0, args.updates, folder)[0] for name in args.ways})
    result = {
        "command": shlex.join(["python", "scripts/better_heads.py", *sys.argv[1:]]),
        "machine": machine(rollouts.model.device, rollouts.model.dtype),
        "settings": rollouts.settings
        | {"updates": args.updates, "batch_positions": BATCH, "lr": LR, "seeds": args.seeds, "layers": LAYERS},
        "held_out": {"responses": len(rollouts.held_out), "positions": int(sum(counts["path"][0]["positions"]))},
        "pass_ms": {name: by for name, by in ms.items() if name.startswith("pass")},
        "ways": summary(counts, ms),
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, way in result["ways"].items():
        print(name, way["tokens_per_round"], way["over_path"], way["propose_ms"], way["tokens_per_second_over_path"])


if __name__ == "__main__":
    main()
