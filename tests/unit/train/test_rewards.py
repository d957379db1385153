"""Answers are found and scored as documented; nothing that a model writes can stop or hang the scoring."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specroll.train import puzzles, rewards
from specroll.train.rewards import last_boxed, last_number, math_reward, puzzle_reward, text_of


@pytest.fixture(scope="module", autouse=True)
def verifier() -> Iterator[rewards._Verifier]:
    """One worker for the file, ended with it."""
    shared = rewards._verifier()
    yield shared
    shared.close()


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"so \boxed{72}", "72", 1.0),
        (r"\boxed{71} no, \boxed{72}", "72", 1.0),
        (r"\boxed{72} no, \boxed{71}", "72", 0.0),
        (r"\boxed{072}", "72", 1.0),
        (r"\boxed{72\text{ apples}}", "72", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
        (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{q - p}", "p - q", 0.0),
        (r"\boxed{Paris}", "Paris", 1.0),
        ("He has 30 + 42 = 72 apples.", "72", 1.0),
        ("#### 72", "72", 1.0),
        ("The cost is $1,000.", "1000", 1.0),
        ("It was 72, now it is 71.", "72", 0.0),
        (r"hence $-q+p$.", "p - q", 1.0),
        (f"72 {'and so on ' * 400}", "72", 0.0),
    ],
)
def test_math(text: str, gold: str, score: float) -> None:
    assert math_reward([text], answer=[gold]) == [score]
    assert math_reward([[{"role": "assistant", "content": text}]], answer=[gold], solution=["unused"]) == [score]


@pytest.mark.parametrize(
    "text",
    ["", "   \n", r"\boxed{", r"\boxed{}", r"\boxed{\frac{}", "{" * 3000, "\x00", "\ud800", "$" * 99, r"\frac" * 200],
)
def test_a_malformed_completion_scores_0(text: str) -> None:
    assert math_reward([text], answer=["72"]) == [0.0]


def test_one_score_per_completion_in_order() -> None:
    assert math_reward([r"\boxed{1}", "junk", r"\boxed{3}"], answer=["1", "2", "3"]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        math_reward(["1"], answer=["1", "2"])


def test_an_endless_computation_is_ended_from_any_thread(
    verifier: rewards._Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker outruns its limit here, so it is ended, and the next question gets a new one."""
    assert verifier.agrees("72", "72.0")
    assert (old := verifier._worker) is not None
    monkeypatch.setattr(verifier, "limit_s", 0.3)
    scores: list[bool] = []
    thread = threading.Thread(target=lambda: scores.append(verifier.agrees("72", r"\boxed{9^{9^{9^9}}}")))
    thread.start()
    thread.join(30)
    assert scores == [False] and old.poll() is not None
    monkeypatch.undo()
    assert verifier.agrees("72", "72.0")
    assert verifier._worker is not old


def test_a_worker_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_worker.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(rewards, "__file__", str(tmp_path / "rewards.py"))
    with pytest.raises(RuntimeError, match=r"exit code 3.*math-verify installed"):
        rewards._Verifier().agrees("72", "72.0")


def test_threads_get_their_own_answers() -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(5):
            if math_reward([f"it is {number}"], answer=[str(number)]) != [1.0]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4 + 3 = 7", "7"),
        ("4-3", "3"),
        ("3 - 4 = -1.", "-1"),
        ("3 - 4 = \N{MINUS SIGN}1", "-1"),
        ("it is 1,234,567.50 in all", "1234567.50"),
        ("1, 2, 3", "3"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{a} \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed {}", ""),
        ("boxed{a}", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_text_of_messages() -> None:
    assert text_of([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]) == "ab"


def spec(name: str, **options: int) -> str:
    return puzzles.specs(name, size=1, seed=3, options=options)[0]


def test_a_sum_is_right_or_wrong() -> None:
    entry = spec("chain_sum")
    gold = puzzles.entry_of(entry)[1]["answer"]
    texts = [
        f"It is {gold}.",
        f"1 + 1 = {gold}",
        f"<answer>{gold}</answer> or 77",
        f"{gold}0",
        "no idea",
        f"{gold} or 77",
    ]
    assert puzzle_reward(texts, entry=[entry] * 6, answer=[gold] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_words_are_scored_by_the_tasks_own_verifier() -> None:
    entry = spec("spell_backward")
    dataset, row = puzzles.entry_of(entry)
    near = row["answer"][:-1] + "q"
    want = [1.0, 1.0, dataset.score_answer(near, row), 0.0]
    texts = [f"<answer> {row['answer']} </answer> done", f"Well:\n{row['answer']}\n", f"<answer>{near}</answer>", ""]
    assert puzzle_reward(texts, entry=[entry] * 4) == want
    assert want[2] < 1.0


@pytest.mark.parametrize(("name", "text"), [("coin_flip", "1" * 500), ("prime_factorization", "[1,2"), ("boxnet", "7")])
def test_a_verifier_that_fails_on_an_answer_scores_0(name: str, text: str) -> None:
    assert puzzle_reward([text], entry=[spec(name)]) == [0.0]


def test_an_entry_is_made_again_from_its_name() -> None:
    specs = puzzles.specs("rearc", size=2, seed=0, options={})
    first = [puzzles.entry_of(name)[1] for name in specs]
    puzzles.entry_of.cache_clear()
    puzzles._dataset.cache_clear()
    assert [puzzles.entry_of(name)[1] for name in specs] == first
    assert json.loads(specs[1])["index"] == 1
