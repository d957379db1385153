"""`specroll bench peers` on a tiny model, with a child that stands in for vLLM: its keys and what goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = ("--running", 1, 2, "--batches", "1x2", "--tokens", 4, "--repeats", 1)
CHILD = """\
import json, os, signal, sys
settings = json.loads(sys.stdin.readline())
{start}
print(json.dumps({{"vllm": "9.9"}}), flush=True)
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    assert max(map(len, request["rows"])) + request["tokens"] <= settings["max_model_len"]
    ends = request["tokens"] == 8 or len(request["rows"]) == 1  # a batch, which has twice the tokens, or a single one
    assert bool(request["stop_ids"]) == ends
    {middle}
    print(json.dumps({{"tokens": len(request["rows"]) * request["tokens"], "seconds": 0.0}}), flush=True)
"""


@pytest.fixture
def peers(specroll: Callable, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:  # type: ignore[type-arg]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "questions.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 3)
    return lambda *options: specroll(
        "bench", "peers", "--model", tiny_folder, "--task", tmp_path / "questions.jsonl", *SMALL, *options
    )


@pytest.fixture
def vllm(tmp_path: Path) -> Callable[..., Path]:
    """The "Python" of an environment in which vLLM behaves like this."""

    def make(start: str = "", middle: str = "") -> Path:
        (tmp_path / "child.py").write_text(CHILD.format(start=start, middle=middle))
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "child.py"}"\n')
        path.chmod(0o755)
        return path

    return make


def test_the_documented_keys_are_there(peers: Callable, vllm: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = tmp_path / "peers.json"
    result = peers("--vllm-python", vllm(), "--json", path)
    assert result.code == 0, result.err
    results = json.loads(path.read_text())
    assert results["complete"] and set(results["cells"]) == {"1", "2", "1x2"}
    assert results["vllm"]["missing"] is None and results["machine"]["vllm"] == "9.9"
    for pair in ("plain_over_hf", "plain_over_vllm"):
        assert set(results[pair]) == {"1", "2"} and set(results["batch"][pair]) == {"1x2"}
    for pair in ("spec_over_plain", "spec_over_vllm", "spec_over_hf"):
        assert results[pair] == results["batch"][pair] == {}  # no heads were given
    assert set(results["cells"]["2"]["tokens_per_second"]) == {"hf", "plain", "vllm"}
    assert set(results["roofline_share"]) == {"1"} and 0 < results["roofline_share"]["1"] < 1
    assert results["cells"]["1"]["roofline"]["share"] == results["roofline_share"]["1"]
    assert "Products and one reading of keys and values over a plain round at 1 running" in result.out


def test_without_vllm_its_keys_are_empty(peers: Callable, vllm: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    cases = (
        ((), "--vllm-python was not given"),
        (("--vllm-python", vllm(start="os.kill(os.getpid(), signal.SIGILL)")), "lacks instructions"),
        (("--vllm-python", vllm(), "--systems", "hf", "plain"), "not among --systems"),
    )
    for number, (options, reason) in enumerate(cases):
        path = tmp_path / f"{number}.json"
        vllm(start="os.kill(os.getpid(), signal.SIGILL)")
        result = peers(*options, "--running", 1, "--json", path)
        results = json.loads(path.read_text())
        assert result.code == 0 and reason in results["vllm"]["missing"] and reason in result.out
        assert results["plain_over_vllm"] == {} and set(results["plain_over_hf"]) == {"1", "2"}


def test_a_child_that_ends_is_told_and_the_command_goes_on(
    peers: Callable,  # type: ignore[type-arg]
    vllm: Callable,  # type: ignore[type-arg]
    tmp_path: Path,
) -> None:
    path = tmp_path / "peers.json"
    options = ("--vllm-python", vllm(middle="if number == 3: sys.exit('no memory left')"), "--json", path)
    result = peers(*options)
    assert result.code == 1 and "no memory left. Mend that environment" in result.err.splitlines()[-1]
    first = json.loads(path.read_text())
    assert set(first["cells"]) == {"1"} and not first["complete"]
    vllm()
    assert peers(*options).code == 0
    results = json.loads(path.read_text())
    assert results["complete"] and set(results["cells"]) == {"1", "2", "1x2"}
    assert results["cells"]["1"] == first["cells"]["1"] and set(results["roofline_share"]) == {"1"}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--vllm-python", "nowhere/python"), 1, "there is no nowhere/python"),
        (("--vllm-python", "."), 1, "is a folder: name the Python in it"),
        (("--systems", "untrained"), 2, "systems are hf, plain, spec, vllm; got untrained"),
        (("--systems", "spec", "vllm"), 1, "nothing to measure: the system spec needs --heads"),
        (("--repeats", 0), 2, "repeats must be at least 1"),
    ],
)
def test_refusals_are_one_line(peers: Callable, options: tuple[object, ...], code: int, words: str) -> None:  # type: ignore[type-arg]
    result = peers(*options)
    assert result.code == code and words in result.err and result.err.count("\n") == 1
