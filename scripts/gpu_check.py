"""Check on a GPU that rollouts are those of the CPU, and measure what a pass and the plain loop cost there.

    python scripts/gpu_check.py [--json FILE]                  # Qwen2.5's 1.5B and 7B shapes, random weights
    python scripts/gpu_check.py --device cpu --shape tiny      # the script itself, in under a minute, without a GPU

Nothing is downloaded. Models are built from their published shapes; their last norm is scaled so that their laws are
about as peaked as those of text. Parity is checked in float32 on a slice of two layers, speed in bfloat16 on the whole.
Exit code 1 if a check failed, or if there is no such device. Needs an installed specroll.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from specroll import device as devices
from specroll import noise
from specroll.bench.profile import rounds_of
from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine
from specroll.engine.measure import fresh_curve
from specroll.model.graphs import RecordedPasses
from specroll.model.prove import TOLERANCE, worst_difference
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Request, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 311,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
SAMPLING = SamplingParams(seed=1, top_p=0.95)
RUNNING = (1, 8, 32, 64, 256)
PROMPT_TOKENS, NEW_TOKENS = 64, 48
SLICE_LAYERS = 2
LOGIT_SPREAD = 4.0  # standard deviation of the logits
LIMIT_SECONDS = 330  # nothing more is begun after that


def build(shape: str, device: torch.device | str, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
    """A model of the shape, made on the device; `layers` takes so many instead of all."""
    sizes = {**SHAPES[shape], **({} if layers is None else {"num_hidden_layers": layers})}
    config = Qwen2Config(
        **sizes, max_position_embeddings=32768, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    head = model.get_output_embeddings().weight
    model.model.norm.weight.data.fill_(LOGIT_SPREAD / (config.initializer_range * head.shape[1] ** 0.5))
    return model.eval()


def fits(shape: str, device: torch.device) -> bool:
    """Whether the whole model and as much as half of it again can be had."""
    weights = sum(p.numel() * 2 for p in build(shape, "meta", torch.bfloat16).parameters())
    return 1.5 * weights < devices.free_bytes(device)


def use_graphs(engine: Engine, on: bool) -> None:
    """With CUDA graphs or without; on a CPU the same buckets and buffers without a graph, or plain passes."""
    target = engine.target
    if target.recorded is None:
        way = devices.recorder(target.device) or devices.Eager()
        target.recorded = RecordedPasses(way, target.device, type(target.causal).__name__)
    target.recorded.enabled = on


def prompts_of(vocab_size: int, count: int, tokens: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(row) for row in torch.randint(vocab_size, (count, tokens), generator=generator).tolist()]


def tokens_of(engine: Engine, graphs: bool) -> list[list[int]]:
    """Eight responses to four prompts, of 3 to 10 tokens, in slots for six."""
    use_graphs(engine, graphs)
    prompts = prompts_of(engine.target.vocab_size, 4, 12)
    requests = [Request(prompt_ids=prompts[i // 2], sample=i, max_new_tokens=3 + i) for i in range(8)]
    return [c.token_ids for c in engine.generate(requests, SAMPLING).completions]


def noise_differs(device: torch.device, vocab_size: int) -> int:
    """Row keys and uniforms that are not bit for bit those of the CPU; what follows are rounded logarithms."""
    sample_N, position_N = torch.arange(64) * 977 - 5, torch.arange(64) * 31
    keys = noise.row_keys(7, sample_N, position_N)
    there = noise.row_keys(7, sample_N.to(device), position_N.to(device))
    uniforms, others = noise.uniform_all(keys, vocab_size), noise.uniform_all(there, vocab_size).cpu()
    return int((keys != there.cpu()).sum()) + int((uniforms != others).sum())


def logits_differ(model: PreTrainedModel, reference: PreTrainedModel) -> float:
    """Largest difference of a prompt's logits to those of the CPU, as a share of the largest logit."""
    ids = torch.tensor(prompts_of(model.config.vocab_size, 1, 24))
    with torch.inference_mode():
        here = reference(ids).logits
        there = model(ids.to(model.device)).logits.cpu()
    return ((here - there).abs().max() / here.abs().max()).item()


def parity(shape: str, device: torch.device) -> dict[str, dict[str, Any]]:
    """Each check's `ok`, and by how much or how many it was off."""
    model = build(shape, device, torch.float32, SLICE_LAYERS)
    reference = copy.deepcopy(model).cpu()
    config = EngineConfig(max_running=6)
    plain = Engine(model, config=config, eos_ids=[])
    proposer = HeadsProposer(FutureHeads.for_model(model), model)
    spec = Engine(model, config=config, eos_ids=[], proposer=proposer, budget=BudgetConfig(fixed_nodes=4))
    expected = tokens_of(Engine(reference, config=config, eos_ids=[]), False)
    found = {
        "tokens": tokens_of(plain, False),
        "tokens, graphs": tokens_of(plain, True),
        "tokens, speculation": tokens_of(spec, False),
        "tokens, speculation and graphs": tokens_of(spec, True),
    }
    prompt = torch.tensor(prompts_of(model.config.vocab_size, 1, 24)[0], device=device)
    differences = {
        "logits": logits_differ(model, reference),
        "tree pass, graphs": worst_difference(spec.target, prompt),  # its graphs are still on
    }
    checks: dict[str, dict[str, Any]] = {}
    differing_bits = noise_differs(device, model.config.vocab_size)
    checks["noise"] = {"ok": differing_bits == 0, "differing": differing_bits}
    for name, worst in differences.items():
        checks[name] = {"ok": worst <= TOLERANCE[torch.float32], "worst": worst}
    for name, tokens in found.items():
        differing = sum(a != b for a, b in zip(tokens, expected, strict=True))
        checks[name] = {"ok": differing == 0, "differing": differing}
    recorded = spec.target.recorded
    checks["graphs recorded"] = {"ok": recorded is not None and recorded.enabled and recorded.recordings > 0}
    return checks


def plain_loop(engine: Engine, running: int, tokens: int) -> dict[str, float]:
    """Tokens/s of full plain rounds, prompts not counted, with graphs and without: each kind's second rollout."""
    prompts = prompts_of(engine.target.vocab_size, running, PROMPT_TOKENS)
    speeds = {}
    for name, graphs in (("graphs", True), ("eager", False)):
        use_graphs(engine, graphs)
        for repeat in range(2):
            rounds = rounds_of(engine, prompts, running, tokens, repeat * running)
        seconds = sum(s for r in rounds for stage, s in r.seconds.items() if stage != "prefill")
        speeds[name] = sum(r.emitted for r in rounds) / seconds
    return speeds


def speed(shape: str, device: torch.device, deadline: float) -> dict[str, Any]:
    """The latency surface and the plain loop of the whole model."""
    small = shape == "tiny"
    dtype = torch.bfloat16 if devices.multiplies_bfloat16(device) else torch.float32
    model = build(shape, device, dtype)
    sizes = [n for n in RUNNING if not small or n <= 8]
    engine = Engine(model, config=EngineConfig(max_running=max(sizes)), eos_ids=[])
    found: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "plain_tokens_per_second": {}, "left_out": []}
    for running in sizes:
        if time.monotonic() > deadline:
            found["left_out"].append(f"plain loop at {running}")
            continue
        speeds = plain_loop(engine, running, 4 if small else NEW_TOKENS)
        found["plain_tokens_per_second"][str(running)] = speeds
        print(f"{shape}: {running:4d} running  " + "  ".join(f"{k} {v:.0f} tokens/s" for k, v in speeds.items()))
    if time.monotonic() > deadline:
        found["left_out"].append("latency surface")
        return found
    use_graphs(engine, True)
    with engine.target.rolling_out():
        curve = fresh_curve(engine.target, SAMPLING)
    found["surface_s"] = dict(zip(map(str, curve.rows), curve.seconds, strict=True))
    found["context_s"] = asdict(curve.context)
    print(f"{shape}: rows: ms of a pass and its draws")
    print("  " + "  ".join(f"{rows}: {1e3 * s:.2f}" for rows, s in zip(curve.rows, curve.seconds, strict=True)))
    return found


def check(shapes: list[str], device: torch.device) -> dict[str, Any]:
    began = time.monotonic()
    result: dict[str, Any] = {
        "command": "scripts/gpu_check.py " + " ".join(sys.argv[1:]),
        "machine": {"device": devices.name(device), "torch": torch.__version__},
        "shapes": {},
    }
    for shape in shapes:
        of_shape = result["shapes"][shape] = {}
        if not fits(shape, device):
            of_shape["left_out"] = ["everything: too little memory is free"]
            print(f"{shape}: left out, too little memory is free on {device}")
            continue
        of_shape["parity"] = parity(shape, device)
        for name, found in of_shape["parity"].items():
            details = ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
            print(f"{shape}: {name}: {details}")
        gc.collect()  # the slice's models, before the whole one
        of_shape.update(speed(shape, device, began + LIMIT_SECONDS))
        gc.collect()
    checks = [c["ok"] for s in result["shapes"].values() for c in s.get("parity", {}).values()]
    result["ok"] = bool(checks) and all(checks)
    result["seconds"] = time.monotonic() - began
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be repeated (default: 1.5b and 7b)")
    parser.add_argument("--json", type=Path, help="also write the result here (keys: docs/commands.md)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type != "cpu" and devices.best().type != device.type:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(
            f"gpu_check: PyTorch {torch.__version__} ({built}) sees no {device.type} device here. Run it where one is; "
            "--device cpu --shape tiny tries the script itself without one.",
            file=sys.stderr,
        )
        return 1
    result = check(options.shape or ["1.5b", "7b"], device)
    print(f"{'All checks passed' if result['ok'] else 'A CHECK FAILED'} in {result['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
