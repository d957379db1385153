"""Write every measured figure of README.md and docs/ from the JSON under docs/results/.

    python scripts/figures.py            # rewrites the marked blocks
    python scripts/figures.py --check    # exit code 1 where a block is not what the results say

A block is what stands between `<!-- figures: NAME -->` and `<!-- end -->`; NAME is a function of this file, or
rollout_*, peers_* or adapt_*, a result of `specroll bench rollout`, `bench peers` or `bench adapt`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = ("README.md", "docs/measured.md")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _ratio(found: dict[str, float] | None) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})" if found else ""


def _rollout_table(name: str) -> str:
    results = _load(name)
    named = {
        "plain_over_hf": "plain / transformers",
        "spec_over_plain": "speculative / plain",
        "spec_over_hf": "speculative / transformers",
        "plain_over_vllm": "plain / vLLM",
        "spec_over_vllm": "speculative / vLLM",
        "lean_over_plain": "without Reflex / plain",
        "untrained_over_plain": "untrained heads / plain",
    }
    pairs = [pair for pair in named if any(pair in cell for cell in results["cells"].values())]
    lines = [
        _row("sequences", *(named[pair] for pair in pairs), "tokens per round", "plain tokens/s"),
        _row("--:", *["---"] * len(pairs), "--:", "--:"),
    ]
    for cell_name, cell in results["cells"].items():
        per_round = cell["tokens_per_round"].get("spec")
        lines.append(
            _row(
                cell_name,
                *(_ratio(cell.get(p)) for p in pairs),
                f"{per_round:.2f}" if per_round else "",
                f"{cell['tokens_per_second']['plain']['median']:.0f}",
            )
        )
    lines += _by_rounds(results["cells"])
    memory = results.get("peak_memory_ratio")
    if memory:
        lines += ["", f"Peak memory, heads not counted, over the plain loop's: {memory:.2f}."]
    if shares := results.get("roofline_share"):
        told = ", ".join(f"{share:.0%} at {running}" for running, share in shares.items())
        whole = all("kv_seconds" in results["cells"][running]["roofline"] for running in shares)
        least = "The least time of products and of reading keys and values" if whole else "The products' least time"
        lines += ["", f"{least} over the plain loop's round: {told} running sequences."]
    return "\n".join([*lines, "", f"`{results['command']}`, {_machine(results['machine'])}."])


def _by_rounds(cells: dict[str, Any]) -> list[str]:
    """What every system's rounds made over plain ones at the pace of the same run, where that is known."""
    if not all(cell.get("by_rounds") for cell in cells.values()):
        return []
    named = {"spec": "speculative", "lean": "without Reflex", "untrained": "untrained heads", "hidden": "hidden Reflex"}
    systems = [system for system in named if all(system in cell["by_rounds"] for cell in cells.values())]
    told = [
        f"{named[system]} " + ", ".join(f"{cell['by_rounds'][system]:.3f}" for cell in cells.values())
        for system in systems
    ]
    return ["", f"By rounds, over plain ones at the pace of the same run: {'; '.join(told)}."]


def _machine(machine: dict[str, Any]) -> str:
    cores = f"{machine['threads']} CPU threads ({machine['cpu_capability']})"
    return f"{machine['dtype']}, {cores}, PyTorch {machine['torch']}"


def eight_nodes() -> str:
    results = _load("heads_fit")
    return (
        f"Heads fitted on {results['rollouts']} of the policy's own rollouts ({results['tokens']:,} tokens): "
        f"{results['tokens_per_round_after']:.2f} tokens per round with 8 nodes on held-out prompts, "
        f"{results['tokens_per_round_before']:.2f} before the fit. `{results['command']}`."
    )


def check() -> str:
    lines = [
        _row("dtype", "compared with", "samples", "tokens", "differing samples", "differing tokens", "max dlogp"),
        _row("---", "---", *["--:"] * 5),
    ]
    for name in ("check_float32", "check_bfloat16"):
        if not (RESULTS / f"{name}.json").exists():
            continue
        r = _load(name)
        for other, gap in (("plain", r["max_dlogp_plain"]), ("transformers", r["max_dlogp_trainer"])):
            c = r[other]
            rate = f"{c['differing_token_rate']:.3%}"
            counts = (str(c["samples"]), str(c["tokens"]), str(c["differing_samples"]), rate)
            lines.append(_row(r["dtype"], other, *counts, f"{gap:.1e}"))
    if len(lines) == 2:
        raise FileNotFoundError("no check was measured")
    return "\n".join(lines)


def demo() -> str:
    r = _load("demo")
    lines = [
        _row("", "before", "after"),
        _row("---", "--:", "--:"),
        _row("reward on held-out prompts", f"{r['reward_before']:.2f}", f"{r['reward_after']:.2f}"),
        "",
        _row("running sequences", "plain tokens/s", "speculative tokens/s", "ratio", "tokens per round"),
        _row(*["--:"] * 5),
    ]
    for s in r["speeds"]:
        rates = (f"{s['plain']:.0f}", f"{s['speculative']:.0f}", f"{s['ratio']:.2f}", f"{s['tokens_per_round']:.2f}")
        lines.append(_row(str(s["running"]), *rates))
    share = f"Generation's share of the step {r['generation_share']:.0%}"
    gap = f"log-probability gap to the trainer: mean {r['logp_gap_mean']:.1e}, max {r['logp_gap_max']:.1e}"
    return "\n".join([*lines, "", f"{r['steps']} steps in {r['seconds'] / 60:.0f} minutes. {share}; {gap}."])


def _budget_table(name: str) -> str:
    r = _load(name)
    named = {
        "optimal_over_paper": "optimal / paper's rule",
        "optimal_over_plain": "optimal / plain",
        "paper_over_plain": "paper's rule / plain",
        "random_over_plain": "random heads / plain",
        "hostile_over_plain": "hostile / plain",
        "control_over_plain": "plain / plain",
    }
    lines = [_row("sequences", *named.values()), _row("--:", *["---"] * len(named))]
    lines += [_row(name, *(_ratio(cell.get(pair)) for pair in named)) for name, cell in r["cells"].items()]
    worst, control, by_rounds = r["worst_over_plain"], r["control_worst"], r.get("worst_by_rounds")
    told = (
        f"The optimal budget's least median over the plain loop is {worst['ratio']:.2f} ({worst['case']}), the plain "
        f"loop's over itself {control['ratio']:.2f} ({control['case']})."
    )
    if by_rounds:
        told += f" Against plain rounds of the same run the least is {by_rounds['ratio']:.3f} ({by_rounds['case']})."
    return "\n".join([*lines, "", told, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def _budget_rounds(name: str) -> str:
    r = _load(name)
    named = {"optimal": "optimal", "paper": "paper's rule", "random": "random heads", "hostile": "hostile"}
    lines = [_row("sequences", *(f"{told} / plain" for told in named.values())), _row("--:", *["--:"] * len(named))]
    lines += [_row(name, *(f"{cell['by_rounds'][s]:.3f}" for s in named)) for name, cell in r["cells"].items()]
    return "\n".join([*lines, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def simulate() -> str:
    r = _load("simulate")
    lines = [
        _row("slots", "plain, predicted / measured", "planner, predicted / measured", "gain predicted", "measured"),
        _row(*["--:"] * 5),
    ]
    for running, v in r["validation"].items():
        off = (f"{v[system]['predicted_over_measured']:.2f}" for system in ("plain", "planner"))
        lines.append(_row(running, *off, f"{v['gain_predicted']:.2f}", f"{v['gain_measured']:.2f}"))
    return "\n".join([*lines, "", f"`{r['trace']['command']}`, then `{r['command']}`."])


def scale() -> str:
    r = _load("scale")
    lines = []
    for system, found in (("plain loop", r), ("speculative", r["speculation"])):
        if found is None:
            continue
        lines += [f"{system.capitalize()}, tokens/s over the shortest's:", ""]
        lines += [_row("queued prompts", *found["queue"]), _row("---", *["--:"] * len(found["queue"]))]
        lines += [_row("", *(f"{ratio:.2f}" for ratio in found["queue"].values())), ""]
        contexts = list(next(iter(found["context"].values())))
        lines += [_row("running, by tokens of context", *contexts), _row("--:", *["--:"] * len(contexts))]
        lines += [_row(n, *(f"{ratio:.2f}" for ratio in of_n.values())) for n, of_n in found["context"].items()]
        lines += ["", f"Memory from a tenth of the longest queue to its end: {found['memory_growth']:+.2f} %.", ""]
    return "\n".join([*lines, f"`{r['command']}`, {_machine(r['machine'])}."])


def profile() -> str:
    r = _load("profile")
    rounds = {f"{n} {kind}": ms for n, kinds in r["round_ms"].items() for kind, ms in kinds.items()}
    lines = [
        *_columns("a round's stage, ms", rounds),
        "",
        *_columns("a pass of one row per sequence, ms", r["pass_ms"]),
    ]
    return "\n".join([*lines, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def fused_layers() -> str:
    r = _load("fused_layers")
    lines = [_row("a pass of sequences x rows", *r["pass_ms"]), _row("---", *["--:"] * len(r["pass_ms"]))]
    for row, digits in (("as they are", 1), ("fused", 1), ("ratio", 2)):
        lines.append(
            _row(f"{row}, ms" if digits == 1 else row, *(f"{of[row]:.{digits}f}" for of in r["pass_ms"].values()))
        )
    first = f"The first rollout of the process began after {r['first_rollout_s']:.0f} s."
    return "\n".join([*lines, "", first, "", f"`{r['command']}`, {_machine(r['machine'])}."])


_LAST = 8
"""Steps at a training's end, by which a refresh has shown what it is worth."""


def _last_steps(cells: dict[str, Any]) -> list[str]:
    """What each training came to: refreshes, and tokens per round of every system."""
    seeds = {name: cell["steps"] for name, cell in cells.items() if name.startswith("seed")}
    systems = [name for name in next(iter(seeds.values()))[0]["systems"] if name != "plain"]
    lines = [_row("", *systems), _row("---", *["--:"] * len(systems))]
    for name, steps in seeds.items():
        parts = []
        for system in systems:
            of = [step["systems"][system] for step in steps[-_LAST:]]
            rounds = sum(o["emitted"] for o in of) / sum(o["turns"] for o in of)
            triggers = of[-1].get("triggers")
            parts.append(f"{rounds:.2f}" + ("" if triggers is None else f" (refreshes: {triggers:.0f})"))
        lines.append(_row(name, *parts))
    return lines


def _adapt_table(name: str) -> str:
    r = _load(name)
    shift = r["settings"]["shift"]
    titles = {"ablation": "While GRPO trains"}
    if shift is not None:
        titles["after_shift"] = f"From step {shift['step']} on, with the weights of {shift['to']}, on {shift['task']}"
    lines = []
    for part, title in titles.items():
        head = ("tokens/s", "over heads", "over plain", "tokens per round", "accepted", "end to end, s")
        lines += [f"{title}:", "", _row("", *head), _row("---", *["--:"] * len(head))]
        for system, found in r[part].items():
            over = (r[key][part].get(system) for key in ("over_heads", "over_plain"))
            rounds = (f"{found['tokens_per_round']:.2f}", f"{found['acceptance']:.0%}", f"{found['end_to_end_s']:.0f}")
            ratios = (_interval(ratio, "ratio", 2) for ratio in over)
            lines.append(_row(system, _interval(found, "tokens_per_second", 1), *ratios, *rounds))
        both = ", ".join(f"{_interval(of, 'ratio', 3)} over {base}" for base, of in r["full_over"][part].items())
        lines += ["", f"full: {both}.", ""]
    lines.append(
        f"Reflex took {r['reflex_overhead']:.1%} of a round of {r['settings']['running']} sequences, the slow path "
        f"{r['slow_overhead']:.1%} of the rollouts' time; {r['false_triggers_per_1000_windows']:.1f} false triggers in "
        f"1,000 windows. Samples that differ from plain decoding's: {_differing(r)}."
    )
    lines += ["", f"Tokens per round in the last {_LAST} steps:", "", *_last_steps(r["cells"])]
    return "\n".join([*lines, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def _differing(r: dict[str, Any]) -> int:
    parts = (r[part] for part in ("ablation", "after_shift") if part in r)
    return sum(found["differing_samples"] for part in parts for found in part.values())


def _interval(found: dict[str, float] | None, name: str, places: int) -> str:
    if found is None:
        return ""
    return f"{found[name]:.{places}f} [{found['low']:.{places}f}, {found['high']:.{places}f}]"


def cold_start() -> str:
    r = _load("adapt_shift")
    found = r["cold_start"]
    lessons = {str(lesson["responses"]): lesson["tokens_per_round"] for lesson in found["lessons"]}
    lines = [_row("responses learned from", *lessons, "fitted"), _row("---", *["--:"] * (len(lessons) + 1))]
    lines.append(_row("tokens per round", *(f"{worth:.2f}" for worth in (*lessons.values(), found["fitted"]))))
    share = f"Learning took {found['share']:.0%} of the rollouts' time meanwhile."
    return "\n".join([*lines, "", share, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def reflex_forms() -> str:
    r = _load("reflex_forms")
    named = {"lean": "heads alone", "spec": "--reflex associative", "hidden": "--reflex hidden"}
    lines = [_row("sequences", *named.values()), _row("--:", *["--:"] * len(named))]
    for cell_name, cell in r["cells"].items():
        per_round = cell["tokens_per_round"]
        gains = {s: (per_round[s] - 1) / (per_round["lean"] - 1) - 1 for s in named}
        told = (f"{per_round[s] - 1:.3f}" + ("" if s == "lean" else f" ({gains[s]:+.1%})") for s in named)
        lines.append(_row(cell_name, *told))
    return "\n".join([*lines, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def better_heads() -> str:
    r = _load("better_heads")
    rounds = list(next(iter(r["ways"].values()))["tokens_per_second_over_path"])
    nodes = list(next(iter(r["ways"].values()))["tokens_per_round"])
    head = (
        *(f"{n} nodes" for n in nodes),
        f"more at {nodes[0]} nodes",
        "draft vocabulary",
        "ms at 1",
        "ms at 8",
        *rounds,
    )
    lines = [_row("", *head), _row("---", *["--:"] * len(head))]
    for name, way in r["ways"].items():
        per_round = (" ".join(f"{seed:.2f}" for seed in way["tokens_per_round"][n]) for n in nodes)
        more = "" if name == "path" else _interval(way["over_path"][nodes[0]], "mean", 3)
        ms, ratios = way["propose_ms"], way["tokens_per_second_over_path"]
        told = (f"{way['draft_vocabulary']:,}", f"{ms['1']:.1f}", f"{ms['8']:.1f}")
        lines.append(_row(name, *per_round, more, *told, *(f"{ratios[n]:.3f}" for n in rounds)))
    settings, held_out = r["settings"], r["held_out"]
    passes = [f"{ms:.0f} ms ({what}, {running})" for what, by in r["pass_ms"].items() for running, ms in by.items()]
    told = (
        f"{settings['rollouts']} rollouts, {settings['tokens']:,} tokens; {held_out['responses']} responses held out, "
        f"{held_out['positions']:,.0f} positions of them judged; {settings['updates']} updates of "
        f"{settings['batch_positions']} positions. The first columns are tokens per round, the last "
        f"ones tokens/s over those of path, by running sequences; ms are of a proposal. {', '.join(passes)}."
    )
    return "\n".join([*lines, "", told, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def methods() -> str:
    r = _load("methods")
    named = {
        "heads / plain": "heads_over_plain_generation",
        "both / plain": "specroll_over_plain_generation",
        "both / heads": "specroll_over_heads_generation",
        "FastGRPO / plain": "fastgrpo_over_plain_generation",
        "both / FastGRPO": "specroll_over_fastgrpo_generation",
        "end to end": "specroll_over_fastgrpo_end_to_end",
    }
    named = {head: key for head, key in named.items() if key in r}
    epochs = {f"suffixes / plain, epoch {int(epoch) + 1}": found for epoch, found in r["suffix_over_plain"].items()}
    lines = [_row("setting", *named, *epochs), _row("---", *["---"] * (len(named) + len(epochs)))]
    columns = [r[key] for key in named.values()] + list(epochs.values())
    for setting in columns[0]["settings"]:
        lines.append(_row(setting, *(_interval(c["settings"][setting], "ratio", 2) for c in columns)))
    per_round = defaultdict(list)
    for cell in r["cells"].values():
        per_round[cell["method"]].append(f"{cell['tokens_per_round']:.2f}")
    told = "; ".join(f"{method} {', '.join(found)}" for method, found in per_round.items() if method != "plain")
    share = ", ".join(f"{c['generation_share']:.0%}" for c in r["cells"].values() if c["method"] == "plain")
    fit = _load("drafter_fit")
    said = (
        f"Tokens per round: {told}. Generation's share of a step with plain decoding: {share}. The rival's drafter was "
        f"fitted on {fit['responses']} responses in {fit['updates']} updates (`{fit['command']}`): its likeliest token "
        f"is drawn in {fit['after']['hits']:.0%} of places, {fit['tokens_per_round_after']:.2f} tokens per round with "
        f"{fit['nodes']} nodes. Tuned, it runs with: {_tuned(r['tuning'])}."
    )
    return "\n".join([*lines, "", said, "", f"`{r['command']}`, {_machine(r['machine'])}."])


def _tuned(tuning: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}, {', '.join(f'{key} {value}' for key, value in found['settings'].items())}"
        for name, found in tuning.items()
    )


def _columns(corner: str, columns: dict[str, dict[str, float]]) -> list[str]:
    """A table whose columns are named by running sequences."""
    rows = next(iter(columns.values()))
    lines = [_row(corner, *columns), _row("---", *["--:"] * len(columns))]
    return lines + [_row(row.replace("_", " "), *(f"{c[row]:.1f}" for c in columns.values())) for row in rows]


def render(text: str) -> str:
    """The page with every block written anew."""
    return BLOCK.sub(lambda m: m[1] + _figure(m[2]) + "\n" + m[3], text)


def _figure(name: str) -> str:
    try:
        if name.startswith("adapt_"):
            return _adapt_table(name)
        if name.startswith("budget_rounds"):
            return _budget_rounds(name.replace("budget_rounds", "budget"))
        if name.startswith("budget"):
            return _budget_table(name)
        return _rollout_table(name) if name.startswith(("rollout_", "peers_")) else globals()[name]()
    except FileNotFoundError:
        return "Not measured yet."


def main() -> int:
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if (new := render(text)) != text:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"not what docs/results says: {', '.join(stale)}; run python scripts/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
