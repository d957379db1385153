"""Tasks: a data set of prompts, and the rewards that score what is answered.

Three kinds by name: a reasoning-gym task (made on the spot, no download), a published set (`gsm8k`, `math35`,
`dapo17k`, `math500`), or a path to a `.jsonl` or `.jsonl.gz` file of your own. Knows no model and no trainer: `dataset`
and `reward_funcs` go into TRL's `GRPOTrainer` as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from datasets import Dataset

from specroll.train import published, puzzles
from specroll.train.jsonlines import read_questions
from specroll.train.rewards import NUMBER, math_reward, puzzle_reward

AnswerFormat = Literal["number", "tags", "boxed"]
Split = Literal["train", "held_out"]

INSTRUCTIONS: dict[AnswerFormat, str] = {
    "number": "",  # a question that asks for a number says so itself, and the last number counts
    "tags": "Give the final answer, and nothing else, between <answer> and </answer>.",
    "boxed": "Think step by step, and put the final answer in \\boxed{}.",
}
GOLD: dict[AnswerFormat, str] = {
    "number": "The answer is {}.",
    "tags": "<answer>{}</answer>",
    "boxed": "So we get \\boxed{{{}}}.",
}


@dataclass(frozen=True, slots=True)
class Task:
    """What to train or to evaluate on.

    `dataset` has the columns `prompt` (a list of chat messages), `answer` (the gold answer, None where a puzzle names
    none) and what the rewards need: `entry` for puzzles. `answer_format` says how a completion gives its answer: as the
    last `number`, between answer `tags`, or `boxed`; with the two latter the prompt asks for it.
    """

    name: str
    dataset: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    answer_format: AnswerFormat


def load_task(
    name: str = "chain_sum",
    *,
    data_dir: Path | None = None,
    split: Split = "train",
    size: int | None = None,
    seed: int = 0,
    **task_options: Any,
) -> Task:
    """A task by name, or from a file of questions and answers.

    `size` is the number of rows: made, for a generated task (1000 by default), or else picked by `seed`, in the order
    of the file. `held_out` is made from a seed far away for generated tasks (easy ones have few different questions,
    so some come again), the published test split for gsm8k, and MATH-500 for math35 and dapo17k. `task_options` go to
    the generated task, for instance `max_digits=2`.

    Raises `ValueError` or `FileNotFoundError` that say what is wrong and what to do; a data file is checked whole.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}")
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    is_file = name.endswith((".jsonl", ".jsonl.gz"))
    if is_file or name in published.NAMES:
        if task_options:
            raise ValueError(f"task {name} takes no options, got {', '.join(task_options)}; only generated tasks do")
        rows = _file_rows(Path(name), split) if is_file else published.load_rows(name, split, data_dir)
        return _question_task(name, _pick(rows, size, seed))
    if name not in puzzles.names():
        near = get_close_matches(name, [*published.NAMES, *puzzles.names()], n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(
            f"no task {name!r}{meant} A task is {', '.join(published.NAMES)}, a reasoning-gym task such as chain_sum, "
            "or the path of a .jsonl or .jsonl.gz file"
        )
    seed += puzzles.HELD_OUT if split == "held_out" else 0
    return _puzzle_task(name, puzzles.specs(name, size=size or 1000, seed=seed, options=task_options))


def task_names() -> list[str]:
    """Every name that `load_task` knows."""
    return [*published.NAMES, *puzzles.names()]


def validate(task: Task, n: int = 20) -> int:
    """Score the gold answers of the first `n` rows, written as the task asks; returns how many there were.

    Raises `ValueError` for the first one that does not score 1.0. Rows without a gold answer are passed over.
    """
    first: list[Any] = task.dataset.select(range(min(n, len(task.dataset)))).to_list()
    rows = [row for row in first if row["answer"] is not None]
    columns = {key: [row[key] for row in rows] for key in task.dataset.column_names if key != "prompt"}
    completions = [[{"role": "assistant", "content": GOLD[task.answer_format].format(row["answer"])}] for row in rows]
    for reward in task.reward_funcs:
        for row, score in zip(rows, reward(completions=completions, **columns), strict=True):
            if score != 1.0:
                raise ValueError(
                    f"task {task.name}: the gold answer {row['answer']!r} scores {score}, not 1.0, on the question "
                    f"{row['prompt'][-1]['content'][:200]!r}; correct this row or the reward"
                )
    return len(rows)


def _file_rows(path: Path, split: Split) -> list[dict[str, str]]:
    if split == "held_out":
        raise ValueError(f"{path} has no held-out part; name a second file for evaluation")
    if not path.exists():
        raise FileNotFoundError(f"no data file {path}; give the path of a .jsonl or .jsonl.gz file, or a task's name")
    return read_questions(path)


def _pick(rows: list[dict[str, str]], size: int | None, seed: int) -> list[dict[str, str]]:
    if size is None or size >= len(rows):
        return rows
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), size))]


def _question_task(name: str, rows: list[dict[str, str]]) -> Task:
    columns: dict[str, list[Any]] = {
        "prompt": [_prompt(row["question"], "boxed") for row in rows],
        "answer": [row["answer"] for row in rows],
    }
    if all("solution" in row for row in rows):
        columns["solution"] = [row["solution"] for row in rows]
    return Task(name, Dataset.from_dict(columns), [math_reward], "boxed")


def _puzzle_task(name: str, specs: list[str]) -> Task:
    entries = [puzzles.entry_of(spec)[1] for spec in specs]
    answers = [entry["answer"] for entry in entries]
    numbers = all(answer is not None and NUMBER.fullmatch(answer) for answer in answers)
    answer_format: AnswerFormat = "number" if numbers else "tags"
    columns = {
        "prompt": [_prompt(entry["question"], answer_format) for entry in entries],
        "answer": answers,
        "entry": specs,
    }
    return Task(name, Dataset.from_dict(columns), [puzzle_reward], answer_format)


def _prompt(question: str, answer_format: AnswerFormat) -> list[dict[str, str]]:
    content = "\n\n".join(part for part in (question, INSTRUCTIONS[answer_format]) if part)
    return [{"role": "user", "content": content}]
