"""Reward functions of TRL's kind, and how an answer is found in a completion.

A reward is called with one list per column of the data set and returns one float per completion. Knows no trainer and
no data source. A completion that cannot be read scores 0; it never stops a run.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specroll.train import puzzles

log = logging.getLogger(__name__)

Completion = str | list[dict[str, str]]

# A sign counts only where it cannot be a minus between two terms.
NUMBER = re.compile(r"(?:(?<![\w).])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAIL = 2000  # characters in which a last expression is looked for


def math_reward(completions: Sequence[Completion], answer: Sequence[str], **columns: Any) -> list[float]:
    r"""1.0 where the last `\boxed{...}`, or else the last expression, equals `answer` by math-verify; else 0.0."""
    return [_math_score(text_of(completion), gold) for completion, gold in zip(completions, answer, strict=True)]


def puzzle_reward(completions: Sequence[Completion], entry: Sequence[str], **columns: Any) -> list[float]:
    """The score that the reasoning-gym task of `entry` gives to the answer found in each completion, 0 to 1.

    For a task with a number as answer only the right number counts; its verifier would give a part of the reward to a
    wrong number that contains the right digits.
    """
    return [_puzzle_score(text_of(completion), spec) for completion, spec in zip(completions, entry, strict=True)]


def text_of(completion: Completion) -> str:
    """The text of a completion, plain or as chat messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last whole `\boxed{...}`, braces matched; None without one."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number of a text without thousands separators, as `-12.5`; None without one."""
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return found[-1].replace(",", "") if found else None


def _puzzle_score(text: str, spec: str) -> float:
    dataset, entry = puzzles.entry_of(spec)
    gold = entry["answer"]
    is_number = gold is not None and NUMBER.fullmatch(gold) is not None
    tagged = _TAGS.findall(text)
    if tagged:
        found = tagged[-1].strip()
    elif is_number:
        found = last_number(text)
    else:
        found = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
    if not found:
        return 0.0
    try:
        score = float(dataset.score_answer(found, entry))
    except Exception as error:  # some verifiers fail on answers that they did not foresee: wrong answers, all of them
        log.debug("verifier of %s failed on %r: %r", spec, found, error)
        return 0.0
    return float(score >= 1.0) if is_number else score


def _math_score(text: str, gold: str) -> float:
    boxed = last_boxed(text)
    if boxed is None:
        return float(bool(text.strip()) and _verifier().agrees(gold, text[-_TAIL:]))
    if _squeeze(boxed) == _squeeze(gold):
        return 1.0
    if _is_whole(boxed) and _is_whole(gold):
        return float(int(boxed) == int(gold))
    return float(bool(boxed) and _verifier().agrees(gold, rf"\boxed{{{boxed}}}"))


def _squeeze(text: str) -> str:
    return re.sub(r"\s|\$|\\[,!;]", "", text).rstrip(".")


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d{1,100}", text, re.ASCII) is not None


class _Verifier:
    """math-verify in a process of its own (see `math_worker`), started at the first question, safe from any thread."""

    def __init__(self, limit_s: float = 20.0) -> None:
        self.limit_s = limit_s  # beyond the worker's own limits, which a computation may outrun
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None

    def agrees(self, gold: str, text: str) -> bool:
        """Whether `text` answers with `gold`. False where the worker had to be ended."""
        with self._lock:
            worker = self._worker = self._worker or self._start()
            assert worker.stdin is not None and worker.stdout is not None
            timer = threading.Timer(self.limit_s, worker.kill)
            timer.start()
            try:
                print(json.dumps({"gold": gold, "text": text}), file=worker.stdin, flush=True)
                said = worker.stdout.readline()
            except BrokenPipeError:
                said = ""
            finally:
                timer.cancel()
            if not said:
                log.debug("math-verify was ended over %r", text)
                self._end()
            return said.strip() == "1"

    def _start(self) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is the trainer's to handle; the worker ends with its input
        )
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            worker.communicate()
            raise RuntimeError(
                f"the math-verify process ended at once (exit code {worker.returncode}); its error is printed above. "
                "Is the package math-verify installed?"
            )
        return worker

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None


@functools.cache
def _verifier() -> _Verifier:
    verifier = _Verifier()
    atexit.register(verifier.close)
    return verifier
