"""Peak memory of one rollout, in a process of its own: `python -m specroll.bench.memory SETTINGS.json` prints bytes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def peak_bytes(settings: dict[str, Any]) -> int:
    """Peak resident memory of the rollout that `settings` describe; `main` reads them."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "specroll.bench.memory", file.name], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the memory measurement failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def main(path: Path) -> None:
    import torch

    from specroll.config import BudgetConfig, EngineConfig
    from specroll.engine import Engine
    from specroll.model.load import load_model
    from specroll.propose.proposer import HeadsProposer
    from specroll.propose.store import load_heads
    from specroll.types import Request, SamplingParams

    settings = json.loads(path.read_text())
    torch.set_num_threads(settings["threads"])
    model, tokenizer = load_model(settings["model"], dtype=settings["dtype"])
    heads = settings["heads"]
    proposer = HeadsProposer(load_heads(heads, model), model) if heads else None
    engine = Engine(
        model,
        tokenizer,
        proposer=proposer,
        config=EngineConfig(max_running=64),
        budget=BudgetConfig(fixed_nodes=settings["nodes"] if proposer else None),
    )
    rows = [tuple(p) for p in settings["prompts"] for _ in range(settings["group"])]
    requests = [Request(prompt_ids=p, sample=i, max_new_tokens=settings["tokens"]) for i, p in enumerate(rows)]
    engine.generate(requests, SamplingParams(top_p=0.95))
    print(own_peak_bytes())


def own_peak_bytes() -> int:
    """Peak resident memory of this program alone: Linux's ru_maxrss starts at what the parent held when it forked."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    main(Path(sys.argv[1]))
