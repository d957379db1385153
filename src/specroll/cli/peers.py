"""`specroll bench peers`: our engine between transformers, vLLM and the machine's limit, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specroll.cli.measure import Results, Work, WorkOptions, finish, head, load_work, measure

if TYPE_CHECKING:
    from specroll.bench.peer import VllmPeer
    from specroll.bench.rollout import Cell

PAIRS = ("plain_over_hf", "plain_over_vllm", "spec_over_plain", "spec_over_vllm", "spec_over_hf")
_LIMIT_AT = (1, 32)  # running sequences: bound by memory, and by arithmetic


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    """Time transformers' generate, our plain loop, our speculative engine and vLLM on the same work, interleaved.

    vLLM runs in an environment of its own (docs/commands.md says how to make one). The plain loop is also held against
    the least time of what no pass can do without on this machine.
    """

    vllm_python: Path | None = None
    """The Python of an environment with vLLM; without it vLLM is left out."""
    batches: tuple[str, ...] = ("1x4", "1x8", "8x8")
    """Whole batches, PROMPTSxRESPONSES, that run down to the last row."""
    systems: tuple[str, ...] = ("hf", "plain", "spec", "vllm")
    """Which systems to time."""


def main(options: Options) -> int:
    from specroll.bench.peer import check_python
    from specroll.cli.bench_view import show_summary

    if options.vllm_python is not None:
        check_python(options.vllm_python)  # before anything is loaded
    work = load_work(options)
    results = head(work)
    with _vllm(options, work, results) as peer:
        systems = work.systems(options.systems)
        if not systems:
            raise ValueError("nothing to measure: the system spec needs --heads, the system vllm --vllm-python")
        measure(options, work, systems, PAIRS, results, lambda cell: _limit(work, cell))
        if peer is not None:
            results["vllm"]["protocol_share"] = peer.protocol_share
    limits = {name: cell["roofline"] for name, cell in results["cells"].items() if "roofline" in cell}
    results["roofline_share"] = {name: limit["share"] for name, limit in limits.items()}
    show_summary(results, PAIRS)
    finish(options, results)
    return 0


@contextmanager
def _vllm(options: Options, work: Work, results: Results) -> Iterator[VllmPeer | None]:
    """vLLM as one more system of the work; None where it is not measured, and the results say why."""
    from specroll.bench.peer import CannotRunHereError

    peer, missing = None, None
    if "vllm" not in options.systems:
        missing = "not among --systems"
    elif options.vllm_python is None:
        missing = "--vllm-python was not given"
    else:
        print("Starting vLLM. Where it compiles the model first, that takes minutes.", flush=True)
        try:
            peer = _start(options.vllm_python, work)
        except CannotRunHereError as error:
            missing = str(error)
    results["vllm"] = {"missing": missing}
    results["machine"]["vllm"] = None if peer is None else peer.version
    if peer is None:
        print(f"Without vLLM: {missing}", flush=True)
        yield None
        return
    with peer:
        work.bench.peers["vllm"] = peer.generate
        yield peer


def _start(python: Path, work: Work) -> VllmPeer:
    import torch

    from specroll.bench.peer import PeerSettings, VllmPeer
    from specroll.bench.rollout import MAX_RUNNING

    model, sampling = work.bench.model, work.bench.sampling
    settings = PeerSettings(
        model=model.name_or_path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=max(map(len, work.prompts)) + max(cell.tokens for cell in work.cells),
        max_num_seqs=MAX_RUNNING,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
    return VllmPeer(python, settings, torch.get_num_threads())


def _limit(work: Work, cell: Cell) -> Results:
    """The least time of what no pass can do without, beside the cell's plain rounds, at the two ends of the machine."""
    from specroll.bench.roofline import roofline

    rounds = work.bench.rounds.get("plain")
    if cell.name not in map(str, _LIMIT_AT) or not rounds:
        return {}
    context = statistics.fmean(map(len, work.prompts)) + cell.tokens / 2
    found = roofline(work.bench.engines["plain"].target, rounds, cell.rows, context)
    return {} if found is None else {"roofline": found}
