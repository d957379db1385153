"""Published question sets by name: JSON Lines on this disk first, else the hub's data set.

Knows where each set lies and how the hub's columns become `question`, `answer` and, for gsm8k, `solution`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specroll.train.jsonlines import read_questions
from specroll.train.rewards import last_boxed

Row = dict[str, str]

# The prompt that the DAPO set wraps around each question; ours says where the answer goes.
_DAPO_BEFORE = re.compile(
    r"^Solve the following math problem step by step\. The last line of your response.*?\n\n", re.S
)
_DAPO_AFTER = re.compile(r'\n\nRemember to put your answer on its own line after "Answer:"\.\s*$')


@dataclass(frozen=True)
class Source:
    """One split: the stem of its file, its place on the hub, and what makes rows of the hub's (None leaves one out)."""

    stem: str
    hub: str
    config: str | None
    hub_split: str
    to_row: Callable[[Mapping[str, Any]], Row | None]


def gsm8k_row(row: Mapping[str, Any]) -> Row:
    """`openai/gsm8k`: the answer follows `####` in the worked solution."""
    solution, _, answer = row["answer"].rpartition("####")
    return {"question": row["question"], "answer": answer.strip().replace(",", ""), "solution": solution.strip()}


def math_row(row: Mapping[str, Any]) -> Row | None:
    """MATH: `answer`, or the last box of the worked solution; no row without either."""
    answer = row.get("answer") or last_boxed(row["solution"])
    return {"question": row["problem"], "answer": answer} if answer else None


def math35_row(row: Mapping[str, Any]) -> Row | None:
    """MATH, levels 3 to 5 only. A level is a number or `Level 5`."""
    return math_row(row) if str(row["level"])[-1:] in ("3", "4", "5") else None


def dapo_row(row: Mapping[str, Any]) -> Row:
    """`BytedTsinghua-SIA/DAPO-Math-17k`: chat prompt with its own instructions, which are taken off."""
    question = _DAPO_AFTER.sub("", _DAPO_BEFORE.sub("", row["prompt"][0]["content"]))
    return {"question": question, "answer": row["reward_model"]["ground_truth"]}


_MATH500 = Source("math500_test", "HuggingFaceH4/MATH-500", None, "test", math_row)
SOURCES: dict[tuple[str, str], Source] = {
    ("gsm8k", "train"): Source("gsm8k_train", "openai/gsm8k", "main", "train", gsm8k_row),
    ("gsm8k", "held_out"): Source("gsm8k_test", "openai/gsm8k", "main", "test", gsm8k_row),
    # Its train split is MATH without the 500 questions of MATH-500.
    ("math35", "train"): Source("math_level3to5_train", "nlile/hendrycks-MATH-benchmark", None, "train", math35_row),
    ("math35", "held_out"): _MATH500,
    ("dapo17k", "train"): Source("dapo_math_17k_train", "BytedTsinghua-SIA/DAPO-Math-17k", None, "train", dapo_row),
    ("dapo17k", "held_out"): _MATH500,
    ("math500", "held_out"): _MATH500,
}
NAMES = sorted({name for name, _ in SOURCES})


def load_rows(name: str, split: str, data_dir: Path | None) -> list[Row]:
    """All rows of a published set, from `data_dir` (or `SPECROLL_DATA`) or the hub.

    Raises a `ValueError` that says what was tried and what to do where neither has it.
    """
    if (name, split) not in SOURCES:
        raise ValueError(f"{name} is for evaluation only; load it with split='held_out', or train on another task")
    source = SOURCES[name, split]
    folder = data_dir or (Path(os.environ["SPECROLL_DATA"]) if os.environ.get("SPECROLL_DATA") else None)
    if folder is not None:
        for path in (folder / f"{source.stem}.jsonl.gz", folder / f"{source.stem}.jsonl"):
            if path.exists():
                return read_questions(path)
    try:
        return _from_hub(source)
    except Exception as error:  # no network, no such data set, a refused login, ...: told with its reason
        looked = f"{folder} holds no {source.stem}.jsonl or .jsonl.gz" if folder else "no --data-dir was given"
        raise ValueError(
            f"task {name}: {looked}, and {source.hub} could not be read from the hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}). Put {source.stem}.jsonl (objects "
            "with question and answer) into a folder and name it by --data-dir or SPECROLL_DATA, or go online."
        ) from error


def _from_hub(source: Source) -> list[Row]:
    import datasets

    rows: dict[str, Row] = {}
    found = datasets.load_dataset(source.hub, source.config, split=source.hub_split)
    for row in _first_of_each_index(found):
        made = source.to_row(row)
        if made is not None:
            rows.setdefault(made["question"], made)
    return list(rows.values())


def _first_of_each_index(found: Any) -> Any:
    """DAPO holds each of its 17,917 questions a hundred times, told apart by `extra_info`'s index."""
    if "extra_info" not in found.column_names:
        return found
    first: dict[Any, int] = {}
    for position, info in enumerate(found["extra_info"]):
        first.setdefault(info["index"], position)
    return found.select(list(first.values()))
