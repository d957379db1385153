"""A whole training run in one folder: from names and numbers to a trained adapter, records, and a table.

    config.json    what was asked for           metrics.jsonl   one line per step
    checkpoints/   to resume from               summary.json    what came of it
    adapter/       the trained LoRA adapter (`model/` when all weights were trained), and heads/ if some have learned

Knows the order of things; each is done elsewhere. An interrupted run goes on from its last checkpoint with the same
samples.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from transformers import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

from specroll.config import METHOD, TrainConfig
from specroll.device import best, is_gpu, machine
from specroll.engine import Engine
from specroll.model.load import load_model, native_dtype
from specroll.propose.store import read_manifest, save_heads
from specroll.report.live import LiveView, summary_table
from specroll.report.records import Record, RunFolder, to_json
from specroll.train.callback import StepRecords, StopWell
from specroll.train.data import Task, load_task
from specroll.train.judge import Speed, compare_speed, evaluate, requests_of
from specroll.train.methods import RolloutSettings, described, sampler
from specroll.train.quiet import quiet
from specroll.train.resume import resumed
from specroll.train.rollout import SpecRollout
from specroll.train.terms import sampling_of
from specroll.train.trainer import SpecRollGRPOTrainer

STEPS, DEMO_STEPS = 200, 20
HELD_OUT_PROMPTS, SAMPLES_EACH = 48, 2
"""What the demo evaluates on."""
ALONE = 2
"""Responses that the demo's speed with one running sequence is measured on."""
_BEFORE = "before.json"


@dataclass(slots=True)
class _Run:
    """What the stages of one run share."""

    config: TrainConfig
    folder: RunFolder
    console: Console
    trainer: SpecRollGRPOTrainer
    tokenizer: Any
    steps: int

    @property
    def checkpoints(self) -> Path:
        return self.folder.path / "checkpoints"


def train(
    config: TrainConfig, *, resume: Path | None = None, console: Console | None = None, command: str | None = None
) -> Record:
    """Train, or go on with the run in `resume`; returns what is written to `summary.json` as well.

    `command` is written there too: what a user typed.

    Raises `ValueError` or `OSError` for what the user can mend, and `KeyboardInterrupt` with the command to resume by
    after an interruption.
    """
    console = console or Console()
    if resume is not None:
        config = resumed(config, resume)
    folder = RunFolder(resume or config.output or _new_folder(config.task))
    started = time.monotonic()
    with quiet():
        run = _prepare(config, folder, console, resumes=resume is not None)
        reward_before = _reward_before(run) if config.demo else None
        _train(run)
        summary = _finish(run)
        if config.demo:
            summary |= _demo(run, reward_before)
        summary["seconds"] = time.monotonic() - started
    model: Any = run.trainer.model
    summary |= {"command": command, "machine": machine(model.device, model.dtype)}
    folder.write_summary(summary)
    _show(run, summary)
    return summary


def rows_in_order(dataset: Dataset, count: int, seed: int) -> Dataset:
    """`count` rows, in a new order for each pass over the data set. A longer run begins with the rows of a shorter
    one."""
    order: list[int] = []
    while len(order) < count:
        generator = torch.Generator().manual_seed((seed << 20) + len(order) // len(dataset))
        order += torch.randperm(len(dataset), generator=generator).tolist()
    return dataset.select(order[:count])


def _prepare(config: TrainConfig, folder: RunFolder, console: Console, *, resumes: bool) -> _Run:
    steps = config.steps or (DEMO_STEPS if config.demo else STEPS)
    method = config.method or METHOD
    config = replace(config, steps=steps, method=method)
    task = load_task(config.task, data_dir=config.data_dir, seed=config.seed)
    if config.heads not in ("learn", "none"):
        read_manifest(Path(config.heads))  # a mistake is found before there is a run
    rollouts = RolloutSettings.of(config)
    sampler(rollouts, method)  # likewise
    folder.start(asdict(config), resume=resumes)
    console.print(f"Run {folder.path}: loading the model", markup=False, highlight=False)
    precision = native_dtype(best()) if config.dtype == "auto" else getattr(torch, config.dtype)
    # All weights are trained in float32, under autocast; beside a frozen base, float32 adapters are enough.
    model, tokenizer = load_model(config.model, dtype=precision if config.lora_rank else torch.float32)
    trainer = SpecRollGRPOTrainer(
        model=model,
        reward_funcs=list(task.reward_funcs),
        args=arguments(config, steps, folder.path / "checkpoints", precision),
        train_dataset=rows_in_order(task.dataset, steps * config.prompts_per_step, config.seed),
        processing_class=tokenizer,
        peft_config=lora(config.lora_rank),
        method=method,
        **vars(rollouts),
    )
    trainer.remove_callback(PrinterCallback)
    console.print(
        f"{steps} steps of {config.prompts_per_step} prompts x {config.num_generations} responses on {config.task}, "
        f"{str(model.dtype).removeprefix('torch.')} on {model.device}, {described(config)}",
        markup=False,
        highlight=False,
    )
    return _Run(config, folder, console, trainer, tokenizer, steps)


def arguments(config: TrainConfig, steps: int, checkpoints: Path, precision: torch.dtype) -> GRPOConfig:
    micro = config.micro_batch or config.responses
    gpu = is_gpu(best())
    return GRPOConfig(
        output_dir=str(checkpoints),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=config.responses // micro,
        num_generations=config.num_generations,
        max_completion_length=config.max_completion,
        max_steps=steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        temperature=config.temperature,
        top_p=config.top_p,
        beta=config.beta,
        seed=config.seed,
        bf16=not config.lora_rank and precision == torch.bfloat16,
        gradient_checkpointing=gpu,  # a CPU has memory enough, and time is dear there
        use_cpu=not gpu,
        dataloader_pin_memory=gpu,
        shuffle_dataset=False,  # `rows_in_order` has done it, so that a resumed run meets the same rows in any epoch
        logging_steps=1,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def lora(rank: int) -> LoraConfig | None:
    if not rank:
        return None
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _train(run: _Run) -> None:
    """All steps that are left. Raises KeyboardInterrupt, with the command to resume by, if the user stops it."""
    checkpoint = get_last_checkpoint(str(run.checkpoints)) if run.checkpoints.is_dir() else None
    stop = StopWell(lambda text: run.console.print(text, markup=False, highlight=False))
    try:
        with LiveView(run.steps, console=run.console) as view, stop:
            run.trainer.add_callback(StepRecords(run.folder, view))
            run.trainer.add_callback(stop)
            run.trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(run)) from None
    if stop.asked and run.trainer.state.global_step < run.steps:
        raise KeyboardInterrupt(_how_to_resume(run))


def _how_to_resume(run: _Run) -> str:
    saved = get_last_checkpoint(str(run.checkpoints)) if run.checkpoints.is_dir() else None
    where = f"saved at step {saved.rpartition('-')[2]} of {run.steps}" if saved else "nothing was saved yet"
    return f"{where}; go on with: specroll train --resume {run.folder.path}"


def _finish(run: _Run) -> Record:
    """Save what was trained; returns what the steps' records say."""
    target = run.folder.path / ("adapter" if run.config.lora_rank else "model")
    run.trainer.model.save_pretrained(target)  # type: ignore[union-attr, operator]
    run.tokenizer.save_pretrained(target)
    wrote: dict[str, Any] = {"weights": target}
    learner, engine = run.trainer.rollout.learner, run.trainer.rollout.engine
    if learner is not None and engine is not None and learner.version:
        wrote["heads"] = save_heads(learner.heads, run.folder.path / "heads", engine.target.causal)
    steps = run.folder.metrics()
    return {
        "steps": len(steps),
        "reward_first": _mean(steps[:8], "reward"),
        "reward_last": _mean(steps[-8:], "reward"),
        "tokens_per_round": _mean(steps[-8:], "specroll/tokens_per_round"),
        "generation_share": _mean(steps, "specroll/generation_share"),
        "logp_gap_mean": _mean(steps, "specroll/logp_gap_mean"),
        "logp_gap_max": max(
            (s["specroll/logp_gap_max"] for s in steps if s.get("specroll/logp_gap_max")), default=None
        ),
        "wrote": wrote,
    }


def _mean(steps: list[Record], key: str) -> float | None:
    values = [step[key] for step in steps if step.get(key) is not None]
    return sum(values) / len(values) if values else None


def _held_out(run: _Run) -> Task:
    return load_task(
        run.config.task, data_dir=run.config.data_dir, split="held_out", size=HELD_OUT_PROMPTS, seed=run.config.seed
    )


def _engine(run: _Run) -> Engine:
    assert isinstance(run.trainer.rollout, SpecRollout)  # a method without an engine has no demo
    return run.trainer.rollout.engine_of(run.trainer)


def _evaluate(run: _Run, what: str) -> float:
    run.console.print(f"Evaluating {what} on {HELD_OUT_PROMPTS} held-out prompts", markup=False, highlight=False)
    engine = _engine(run)
    sampling, _ = sampling_of(run.trainer)
    reward = evaluate(engine, _held_out(run), run.tokenizer, sampling, SAMPLES_EACH, run.config.max_completion)
    engine.target.release()
    return reward


def _reward_before(run: _Run) -> float:
    """Of the untrained policy: measured once, and kept for a resumed run."""
    kept = run.folder.path / _BEFORE
    if not kept.exists():
        kept.write_text(to_json({"reward": _evaluate(run, "the model as it is")}), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))["reward"]


def _demo(run: _Run, reward_before: float | None) -> Record:
    """Reward after, and the speed that the trained policy is decoded with."""
    reward_after = _evaluate(run, "the trained model")
    engine = _engine(run)
    sampling, _ = sampling_of(run.trainer)
    speeds: list[Speed] = []
    if engine.proposer is not None:
        run.console.print("Measuring the speed with and without speculation", markup=False, highlight=False)
        requests = requests_of(_held_out(run), run.tokenizer, run.config.num_generations, run.config.max_completion)
        batch = requests[: run.config.responses]
        alone = requests[:: run.config.num_generations][:ALONE]
        speeds = [
            compare_speed(engine, alone, sampling, running=1),
            compare_speed(engine, batch, sampling, running=len(batch)),
        ]
    return {"reward_before": reward_before, "reward_after": reward_after, "speeds": speeds}


def _show(run: _Run, summary: Record) -> None:
    """The table at the end, and where everything lies."""
    if run.config.demo:
        before, after = summary["reward_before"], summary["reward_after"]
    else:
        before, after = summary["reward_first"], summary["reward_last"]
    label = "reward on held-out prompts" if run.config.demo else "reward, first and last 8 steps"
    run.console.print(summary_table([(label, before, after)], columns=("", "before", "after")))
    if speeds := summary.get("speeds"):
        columns = ("tokens/s, running", "plain", "heads", "ratio", "tokens/round", "differing")
        rows = [
            (str(s.running), s.plain, s.speculative, s.ratio, s.tokens_per_round, s.differing_tokens) for s in speeds
        ]
        run.console.print(summary_table(rows, columns=columns))
    gap = (summary["logp_gap_mean"], summary["logp_gap_max"])
    if None not in gap:
        run.console.print(f"|log p(rollout) - log p(trainer)|: mean {gap[0]:.1e}, max {gap[1]:.1e}", highlight=False)
    wrote = ", ".join(f"{name} {path}" for name, path in summary["wrote"].items())
    run.console.print(f"Wrote {run.folder.path}: {wrote}", markup=False, highlight=False, soft_wrap=True)
    run.console.print(f"Draw it with: specroll report {run.folder.path}", markup=False, highlight=False, soft_wrap=True)


def _new_folder(task: str) -> Path:
    name = Path(task).name.partition(".")[0]
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
