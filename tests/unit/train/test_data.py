"""Tasks load from each of their places, say what is wrong with a place, and give their gold answers the full reward."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from specroll.train import published, puzzles, rewards
from specroll.train.data import Task, load_task, task_names, validate
from specroll.train.jsonlines import read_questions

DATA = Path(os.environ.get("SPECROLL_DATA") or Path(__file__).parents[4] / "shared" / "data")
NO_NETWORK = ConnectionError("Couldn't reach the hub\nand more")


@pytest.fixture(scope="module", autouse=True)
def end_verifier() -> Iterator[None]:
    yield
    rewards._verifier().close()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the hub, and none sees this machine's own data by accident."""
    monkeypatch.delenv("SPECROLL_DATA", raising=False)
    serve(monkeypatch, NO_NETWORK)


def serve(monkeypatch: pytest.MonkeyPatch, answer: Exception | list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Let the hub answer with these rows, or fail; returns the list of what it is asked for."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, *, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        if isinstance(answer, Exception):
            raise answer
        return datasets.Dataset.from_list(answer)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def write(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def questions(task: Task) -> list[str]:
    return [prompt[-1]["content"].partition("\n\nThink")[0] for prompt in task.dataset["prompt"]]


def test_the_default_is_one_digit_sums() -> None:
    task = load_task(size=30)
    assert task.answer_format == "number"
    assert task.dataset.column_names == ["prompt", "answer", "entry"]
    for prompt in task.dataset["prompt"]:
        assert len(prompt) == 1 and prompt[0]["role"] == "user"
        *_, first, _, second, equals = prompt[0]["content"].split()
        assert 0 <= int(first) <= 9 and 0 <= int(second) <= 9 and equals == "="
    assert validate(task, 30) == 30


def test_options_seeds_and_splits_of_generated_tasks() -> None:
    base = questions(load_task(size=20))
    assert questions(load_task(size=20)) == base
    assert questions(load_task(size=20, seed=1)) != base
    held_out = load_task(size=20, split="held_out")
    assert not set(held_out.dataset["entry"]) & set(load_task(size=20).dataset["entry"])
    for seed in range(30):  # entry i of seed s is entry i - 1 of seed s + 1: the held-out ones stay clear of them all
        assert questions(load_task(size=20, seed=seed)) != questions(held_out)
    numbers = [
        int(word) for text in questions(load_task(size=9, min_digits=3, max_digits=3)) for word in text.split()[-4:-1:2]
    ]
    assert all(100 <= number <= 999 for number in numbers)


@pytest.mark.parametrize("name", ["spell_backward", "number_sorting", "fraction_simplification", "letter_counting"])
def test_gold_answers_of_generated_tasks_score_1(name: str) -> None:
    task = load_task(name, size=6)
    assert validate(task) == 6
    asks_for_tags = "<answer>" in task.dataset[0]["prompt"][0]["content"]
    assert asks_for_tags == (task.answer_format == "tags")


def test_a_puzzle_without_a_gold_answer_loads() -> None:
    task = load_task("graph_color", size=3)
    assert task.dataset["answer"] == [None] * 3
    assert validate(task) == 0


def test_validate_names_the_row_that_fails() -> None:
    good = load_task(size=5)
    rows = good.dataset.to_list()
    rows[3]["answer"] = "1000"
    bad = Task("sums", datasets.Dataset.from_list(rows), good.reward_funcs, "number")
    assert validate(bad, 3) == 3
    with pytest.raises(ValueError, match=r"task sums: the gold answer '1000' scores 0\.0"):
        validate(bad)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"name": "chain_sums"}, "did you mean chain_sum"),
        ({"name": "gsm"}, "no task 'gsm'"),
        ({"digits": 2}, r"no option digits; it has min_terms, max_terms, min_digits"),
        ({"min_digits": 3}, "refuses its options .* max_digits must be >= min_digits"),
        ({"split": "test"}, "split must be one of train, held_out, got 'test'"),
        ({"size": 0}, "size must be at least 1"),
        ({"name": "gsm8k", "max_digits": 2}, "gsm8k takes no options, got max_digits"),
        ({"name": "math500"}, "math500 is for evaluation only"),
    ],
)
def test_a_mistaken_task_is_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_task(**arguments)


def test_your_own_file(tmp_path: Path) -> None:
    lines = [{"question": f"What is {n} + {n}?", "answer": 2 * n, "more": []} for n in range(9)]
    for path in (write(tmp_path / "own.jsonl", *lines, "  "), write(tmp_path / "own.jsonl.gz", *lines)):
        task = load_task(str(path))
        assert task.answer_format == "boxed"
        assert task.dataset.column_names == ["prompt", "answer"]
        assert task.dataset["answer"] == [str(2 * n) for n in range(9)]
        assert task.dataset[2]["prompt"] == [
            {"role": "user", "content": "What is 2 + 2?\n\nThink step by step, and put the final answer in \\boxed{}."}
        ]
        assert validate(task) == 9
    some = questions(load_task(str(path), size=4))
    assert len(some) == 4 and some == sorted(some) and questions(load_task(str(path), size=4)) == some
    assert {tuple(questions(load_task(str(path), size=4, seed=seed))) for seed in range(9)} != {tuple(some)}
    with pytest.raises(ValueError, match="has no held-out part"):
        load_task(str(path), split="held_out")
    with pytest.raises(FileNotFoundError, match=r"no data file .*none\.jsonl; give the path"):
        load_task(str(tmp_path / "none.jsonl"))


def test_every_broken_line_is_found_before_anything_starts(tmp_path: Path) -> None:
    good = {"question": "q", "answer": "a"}
    path = tmp_path / "own.jsonl"
    path.write_bytes(
        b"\n".join(
            [
                json.dumps(good).encode(),
                b'{"question": "q", "answ',
                b"[1]",
                b'{"question": "q"}',
                b'{"question": "q", "answer": ["a"]}',
                b'{"question": " ", "answer": "a"}',
                b'{"question": "\xff"}',
                b'{"question": "q", "answer": true}',
                b'"q"',
            ]
        )
    )
    with pytest.raises(ValueError, match="line 2") as caught:
        load_task(str(path))
    told = str(caught.value).split("\n")
    for line, number, what, todo in zip(
        told,
        (2, 3, 4, 5, 6),
        ("not JSON", "got a list", 'no "answer"', '"answer" is a list', '"question" is empty'),
        ("write one whole object", "write {", 'every line needs "question"', "make it a string", "fill it in"),
        strict=False,
    ):
        assert line.startswith(f"{path}, line {number}: ") and what in line and todo in line
    assert told[5:] == ["... and 3 more broken lines"]


def test_a_file_that_is_no_data_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows; write one JSON object per line"):
        read_questions(write(tmp_path / "empty.jsonl", ""))
    whole = write(tmp_path / "a.jsonl.gz", {"question": "q", "answer": "a"}).read_bytes()
    for broken in (whole[:-9], b"plain text", whole[:12] + b"\xff\xff" + whole[14:]):
        (tmp_path / "a.jsonl.gz").write_bytes(broken)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz: not a whole gzip file"):
            read_questions(tmp_path / "a.jsonl.gz")


def test_published_sets_come_from_the_data_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "x", "question": "q", "answer": "7", "solution": "s"}
    write(tmp_path / "gsm8k_train.jsonl.gz", row)
    write(tmp_path / "gsm8k_test.jsonl", {**row, "question": "t"})
    task = load_task("gsm8k", data_dir=tmp_path)
    assert questions(task) == ["q"] and task.dataset["solution"] == ["s"]
    monkeypatch.setenv("SPECROLL_DATA", str(tmp_path))
    assert questions(load_task("gsm8k", split="held_out")) == ["t"]


def test_neither_disk_nor_hub_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no --data-dir was given, and openai/gsm8k could not be read .*ConnectionError"
    ):
        load_task("gsm8k")
    with pytest.raises(ValueError, match=r"holds no math_level3to5_train\.jsonl or .*SPECROLL_DATA") as caught:
        load_task("math35", data_dir=tmp_path)
    assert "\n" not in str(caught.value) and caught.value.__cause__ is NO_NETWORK


def test_gsm8k_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(monkeypatch, [{"question": "q", "answer": "Half of 48 is 24.\n48+24 = <<48+24=72>>72\n#### 1,072"}])
    task = load_task("gsm8k")
    assert asked == [("openai/gsm8k", "main", "train")]
    assert task.dataset["answer"] == ["1072"]
    assert task.dataset["solution"] == ["Half of 48 is 24.\n48+24 = <<48+24=72>>72"]
    load_task("gsm8k", split="held_out")
    assert asked[1] == ("openai/gsm8k", "main", "test")


def test_math_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(problem: str, level: Any, **columns: str) -> dict[str, Any]:
        return {
            "problem": problem,
            "level": level,
            "solution": r"so \boxed{\frac{1}{2}}.",
            "subject": "Algebra",
            **columns,
        }

    asked = serve(monkeypatch, [row("a", 5, answer="p - q"), row("b", 2, answer="1"), row("a", 5, answer="p - q")])
    task = load_task("math35")
    assert asked == [("nlile/hendrycks-MATH-benchmark", None, "train")]
    assert questions(task) == ["a"] and task.dataset["answer"] == ["p - q"]
    serve(
        monkeypatch, [row("c", "Level 3"), row("d", "Level 1"), row("e", "Level ?"), row("f", "Level 4", solution="?")]
    )
    assert load_task("math35").dataset["answer"] == [r"\frac{1}{2}"]
    asked = serve(monkeypatch, [row("g", 1, answer="3")])
    assert questions(load_task("math500", split="held_out")) == ["g"]
    assert asked == [("HuggingFaceH4/MATH-500", None, "test")]


def test_dapo_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    after = '\n\nRemember to put your answer on its own line after "Answer:".'

    def row(index: str, question: str, answer: str) -> dict[str, Any]:
        return {
            "data_source": "math_dapo",
            "prompt": [{"content": before + question + after, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": index},
        }

    asked = serve(
        monkeypatch, [row("i", "Find x.\n\nNow.", "34"), row("j", "Find y.", "-5"), row("i", "Find x.\n\nNow.", "34")]
    )
    task = load_task("dapo17k")
    assert asked == [("BytedTsinghua-SIA/DAPO-Math-17k", None, "train")]
    assert questions(task) == ["Find x.\n\nNow.", "Find y."] and task.dataset["answer"] == ["34", "-5"]


def test_a_hub_set_that_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, [{"problem": "q", "result": "7"}])
    with pytest.raises(ValueError, match=r"openai/gsm8k could not be read from the hub \(KeyError: 'answer'\)"):
        load_task("gsm8k")


def test_names_and_sources_agree() -> None:
    assert {"gsm8k", "math35", "dapo17k", "math500", "chain_sum"} <= set(task_names())
    assert len(set(task_names())) == len(task_names()), "no published set hides a generated task"
    assert set(puzzles.OPTIONS) <= set(puzzles.names())
    assert {split for _, split in published.SOURCES} == {"train", "held_out"}


@pytest.mark.parametrize(("name", "split"), list(published.SOURCES))
def test_real_files_load_and_their_gold_answers_score_1(name: str, split: Any) -> None:
    stem = published.SOURCES[name, split].stem
    if not any((DATA / f"{stem}{end}").exists() for end in (".jsonl", ".jsonl.gz")):
        pytest.skip(f"no {stem}.jsonl(.gz) in {DATA}; set SPECROLL_DATA to a folder that has it")
    task = load_task(name, split=split, data_dir=DATA)
    assert len(task.dataset) > 200
    assert validate(task, 200) == 200
