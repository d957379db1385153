"""`specroll check`: proves on the user's own model and settings that speculation changes no token."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specroll.cli.common import (
    ModelOptions,
    SamplingOptions,
    check_at_least,
    find_own_modules,
    quiet_loading,
    refuse_existing,
)  # fmt: skip
from specroll.config import proposer_names

if TYPE_CHECKING:
    from specroll.check import CheckReport, Comparison, Difference
    from specroll.engine import Engine

_SHOWN = 10
_GROUP = 4


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SamplingOptions):
    """Sample with speculation, without it, and with transformers' greedy generate fed with the same noise.

    All must agree. Without --heads or --proposers the proposals are the plain loop's own tokens, spoilt on purpose in
    two of five places. In float32 a single differing token is a failure (exit code 1); in lower precision the rate is
    reported.
    """

    samples: int = 64
    """Samples to compare, four per prompt."""
    max_new_tokens: int = 32
    """Most tokens of a sample."""
    prompt: tuple[str, ...] = field(default=(), metadata={"text": True})
    """Texts to answer [prompts of the task]."""
    task: str = "chain_sum"
    """Where prompts come from: a reasoning-gym task, gsm8k, math35, dapo17k, or a .jsonl file."""
    data_dir: Path | None = None
    """Where published data sets lie as JSON Lines."""
    heads: Path | None = None
    """Folder of heads fitted to the model [spoilt copies of the plain loop's tokens]."""
    proposers: str | None = None
    """What proposes, separated by commas: heads, suffix, or a class of your own as module:Class [heads, if they are
    given]."""
    nodes: int = 6
    """Tokens proposed per sample in every round."""
    json: Path | None = None
    """Write the result here (keys: docs/commands.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, samples=self.samples, max_new_tokens=self.max_new_tokens, nodes=self.nodes)
        if self.proposers is not None:
            proposer_names(self.proposers)


def main(options: Options) -> int:
    from rich.console import Console

    from specroll.build import build_engine, make_requests
    from specroll.check import check
    from specroll.cli.progress import Progress
    from specroll.device import machine

    refuse_existing(options.json, "result")
    find_own_modules(options.proposers)
    sampling = options.sampling()
    group = min(_GROUP, options.samples)
    prompts = _prompts(options, -(-options.samples // group))
    with quiet_loading():
        engine = build_engine(
            options.model,
            heads=options.heads,
            proposers=options.proposers,
            dtype=options.dtype,
            fixed_nodes=options.nodes,
            max_running=64,
        )
    per_prompt = -(-options.samples // len(prompts))
    requests = make_requests(
        engine.tokenizer, prompts, samples=per_prompt, max_new_tokens=options.max_new_tokens
    )[: options.samples]  # fmt: skip
    with Progress() as progress:
        report = check(engine, requests, sampling, on_progress=progress)
    print(headline(report))
    Console().print(table(report))
    for line in [*differences(report, engine), verdict(report)]:
        print(line)
    if options.json is not None:
        from specroll.report.records import to_json

        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "command": "specroll " + " ".join(sys.argv[1:]),
            "machine": machine(engine.target.device, engine.target.causal.dtype),
            **as_record(report, options),
        }
        options.json.write_text(to_json(record, indent=2) + "\n", encoding="utf-8")
        print(f"Written to {options.json}")
    return 1 if report.dtype == "float32" and not report.exact else 0


def _prompts(options: Options, count: int) -> Sequence[Any]:
    if options.prompt:
        return options.prompt[: options.samples]
    from specroll.train.data import load_task

    task = load_task(options.task, data_dir=options.data_dir, size=count, seed=options.seed)
    return task.dataset["prompt"][:count]


def table(report: CheckReport) -> Any:
    from specroll.report.live import summary_table

    def row(name: str, made: Comparison, dlogp: str) -> list[object]:
        return [name, made.samples, made.tokens, len(made.differences), f"{made.rate:.3%}", dlogp]

    rows = [
        row("the plain loop", report.plain, f"{report.max_dlogp_plain:.1e}"),
        row("transformers generate", report.transformers, ""),
        ["a full forward pass", report.plain.samples, None, None, None, f"{report.max_dlogp_trainer:.1e}"],
    ]
    return summary_table(rows, columns=("against", "samples", "tokens", "differing", "rate", "max |dlogp|"))


def headline(report: CheckReport) -> str:
    return (
        f"Speculation ({report.dtype}, {report.proposer}, {report.nodes} nodes: {report.tokens_per_round:.2f} tokens "
        f"per round, {report.acceptance:.0%} of proposals accepted)"
    )


def differences(report: CheckReport, engine: Engine) -> list[str]:
    """A line for each of the first differences, with its margin: a near-tie tells of rounding, others of a fault."""
    told = [
        _difference(engine, name, difference)
        for name, made in (("plain loop", report.plain), ("transformers", report.transformers))
        for difference in made.differences
    ]
    more = [f"... and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return told[:_SHOWN] + more


def _difference(engine: Engine, name: str, difference: Difference) -> str:
    def text(token: int) -> str:
        return "nothing" if token < 0 else f"{token} {engine.tokenizer.decode([token])!r}"

    reason = "a near-tie, decided by rounding" if difference.near_tie else "NOT explained by rounding"
    return (
        f"sample {difference.request + 1}, token {difference.index + 1}: {text(difference.token)}, {name} "
        f"{text(difference.other_token)}; gap of best to second {difference.margin:.1e}: {reason}"
    )


def verdict(report: CheckReport) -> str:
    compared = f"{report.plain.samples} samples, {report.plain.tokens} tokens"
    if report.exact:
        return f"EXACT: {compared}: speculation on = off = transformers, no token differs."
    if not report.differences:
        return f"FAILED: {compared} are equal, but log-probabilities differ by more than rounding can explain."
    wide = sum(not d.near_tie for d in report.differences)
    kind = f"{wide} of them NOT explained by rounding" if wide else "all of them near-ties, decided by rounding"
    if report.dtype == "float32":
        advice = "Please report the model and the settings" if wide else "Another --seed meets other ties"
        return f"FAILED: {compared}: {len(report.differences)} differences, {kind}. {advice}."
    rate = max(report.plain.rate, report.transformers.rate)
    return f"{report.dtype}: {rate:.3%} of tokens differ, {kind}. With --dtype float32 all must be equal."


def as_record(report: CheckReport, options: Options) -> Mapping[str, Any]:
    """The result for a JSON file; keys in docs/commands.md."""

    def comparison(made: Comparison) -> dict[str, Any]:
        return {
            "samples": made.samples,
            "tokens": made.tokens,
            "differing_samples": len(made.differences),
            "differing_token_rate": made.rate,
            "differences": [
                {
                    "sample": d.request,
                    "token_index": d.index,
                    "token": d.token,
                    "other_token": d.other_token,
                    "margin": d.margin,
                    "near_tie": d.near_tie,
                }
                for d in made.differences
            ],
        }

    return {
        "options": options,
        "exact": report.exact,
        "dtype": report.dtype,
        "proposer": report.proposer,
        "nodes": report.nodes,
        "tokens_per_round": report.tokens_per_round,
        "acceptance": report.acceptance,
        "plain": comparison(report.plain),
        "transformers": comparison(report.transformers),
        "max_dlogp_plain": report.max_dlogp_plain,
        "max_dlogp_trainer": report.max_dlogp_trainer,
        "seconds": report.seconds,
    }
