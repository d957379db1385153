"""The vLLM peer without vLLM: children that speak its protocol, and its own script beside a made-up vllm package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specroll.bench import peer as peers
from specroll.bench.peer import CannotRunHereError, PeerError, PeerSettings, VllmPeer, check_python

SETTINGS = PeerSettings(model="m", dtype="float32", max_model_len=9, max_num_seqs=4, temperature=1.0, top_p=0.95)
HEAD = """\
import json, os, signal, sys
def say(message): print(json.dumps(message), flush=True)
settings = json.loads(sys.stdin.readline())
"""

Python = Callable[[str], Path]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """A "Python" that runs this source, whatever script it is given."""

    def make(source: str) -> Path:
        (tmp_path / "child.py").write_text(HEAD + source)
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "child.py"}"\n')
        path.chmod(0o755)
        return path

    return make


def test_requests_and_answers_arrive(python: Python, tmp_path: Path) -> None:
    path = python(
        f"seen = open({str(tmp_path / 'seen')!r}, 'w')\n"
        "print(json.dumps([settings, dict(os.environ)]), file=seen, flush=True)\n"
        "say({'vllm': '9.9'})\n"
        "for line in sys.stdin:\n"
        "    print(line, end='', file=seen, flush=True)\n"
        "    request = json.loads(line)\n"
        "    say({'tokens': len(request['rows']) * request['tokens'], 'seconds': 0.0})\n"
    )
    with VllmPeer(path, SETTINGS, threads=3) as peer:
        assert peer.version == "9.9" and peer.protocol_share == 0
        assert peer.generate([(1, 2), (3,)], 5, [7], seed=4) == 10
        assert peer.generate([(1,)], 1, [], seed=5) == 1
        assert peer.protocol_share == 1  # the child says that it took no time
    first, *requests = map(json.loads, (tmp_path / "seen").read_text().splitlines())
    assert first[0] == {
        "model": "m",
        "dtype": "float32",
        "max_model_len": 9,
        "max_num_seqs": 4,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    assert first[1]["OMP_NUM_THREADS"] == "3" and first[1]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert requests == [
        {"rows": [[1, 2], [3]], "tokens": 5, "stop_ids": [7], "seed": 4},
        {"rows": [[1]], "tokens": 1, "stop_ids": [], "seed": 5},
    ]
    assert peer._child.returncode == 0  # it left by itself when its input ended
    peer.close()


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("print('\\n'.join(map(str, range(9))), file=sys.stderr); sys.exit(3)", PeerError, "4 | 5 | 6 | 7 | 8"),
        ("sys.exit(3)", PeerError, "ended with code 3. It printed nothing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", PeerError, "signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGILL)", CannotRunHereError, "lacks instructions"),
        ("say({'missing': 'vllm'})", PeerError, "has no vLLM: install it there"),
        ("print('hello', flush=True)", PeerError, "answered 'hello'"),
        ("say(['hello'])", PeerError, "no answer of vLLM's"),
        ("say({'version': '9.9'})", PeerError, "no answer of vLLM's"),
    ],
)
def test_a_child_that_does_not_get_ready(python: Python, source: str, kind: type[PeerError], words: str) -> None:
    with pytest.raises(PeerError) as caught:
        VllmPeer(python(source), SETTINGS, threads=1)
    assert type(caught.value) is kind
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("sys.stdin.readline(); sys.exit(1)", "ended with code 1"),
        ("say('hello')", "no answer of vLLM's"),
        ("say({'tokens': 4})", "no answer of vLLM's"),
        ("say({'tokens': True, 'seconds': 1})", "no answer of vLLM's"),
        ("say({'tokens': 1, 'seconds': 1})", "made 1 tokens for 2 responses"),
        ("say({'tokens': 7, 'seconds': 1})", "made 7 tokens for 2 responses of 3"),
    ],
)
def test_a_child_that_fails_later(python: Python, source: str, words: str) -> None:
    path = python(f"say({{'vllm': '9.9'}})\n{source}\nsys.stdin.read()")
    with VllmPeer(path, SETTINGS, threads=1) as peer, pytest.raises(PeerError) as caught:
        peer.generate([(1,), (2,)], 3, [], seed=0)
    assert words in str(caught.value)


def test_a_child_that_has_left_before_it_is_asked(python: Python) -> None:
    with VllmPeer(python("say({'vllm': '9.9'})\nsys.exit('out of memory')"), SETTINGS, threads=1) as peer:
        peer._child.wait()
        with pytest.raises(PeerError, match=r"ended with code 1\. Its last lines: out of memory\. Mend"):
            peer.generate([(1,)], 1, [], seed=0)


def test_a_child_that_does_not_leave_is_ended(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PATIENCE", 0.2)
    with VllmPeer(python("say({'vllm': '9.9'})\nimport time\ntime.sleep(600)"), SETTINGS, threads=1) as peer:
        pass
    assert peer._child.returncode == -9


def test_what_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for path, words in ((tmp_path / "none", "there is no"), (tmp_path, "is a folder: name the Python in it")):
        with pytest.raises(PeerError, match=words):
            check_python(path)
    with pytest.raises(PeerError, match="cannot be started"):
        VllmPeer(tmp_path / "text", SETTINGS, threads=1)


VLLM = """\
import json
__version__ = "9.9"
print("vllm prints a banner")
class SamplingParams:
    def __init__(self, **values): self.values = values
class _Output:
    def __init__(self, tokens): self.outputs, self.token_ids = [self], tokens
class LLM:
    def __init__(self, model, **settings):
        self.log = open(settings.pop("dtype"), "w")  # the test's own use of a text that is passed through
        self.note(model, settings)
    def note(self, *what): print(json.dumps(what), file=self.log, flush=True)
    def reset_prefix_cache(self): self.note("reset")
    def generate(self, prompts, params, use_tqdm):
        print("vllm prints its progress")
        self.note(prompts, params.values)
        return [_Output([5] * (1 if params.values["stop_token_ids"] else params.values["max_tokens"])) for _ in prompts]
"""


def test_the_script_asks_vllm_for_the_right_law(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "torch.py").write_text("def manual_seed(seed): print('seed', seed)")
    (tmp_path / "run.py").write_text("import runpy, sys; runpy.run_path(sys.argv[2], run_name='__main__')")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "run.py"}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    log = tmp_path / "log"
    settings = PeerSettings(model="m", dtype=str(log), max_model_len=9, max_num_seqs=4, temperature=0.5, top_p=0.95)
    with VllmPeer(tmp_path / "python", settings, threads=1) as peer:
        assert peer.version == "9.9"
        assert peer.generate([(1, 2), (3,)], 4, [], seed=1) == 8
        assert peer.generate([(1, 2), (3,)], 4, [7], seed=2) == 2
    loaded, *noted = map(json.loads, log.read_text().splitlines())
    assert loaded == ["m", {"max_model_len": 9, "max_num_seqs": 4, "skip_tokenizer_init": True, "seed": 0}]
    law = {"temperature": 0.5, "top_p": 0.95, "max_tokens": 4, "detokenize": False}
    rows = [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert noted[2:] == [
        ["reset"],
        [rows, {**law, "ignore_eos": True, "stop_token_ids": []}],
        ["reset"],
        [rows, {**law, "ignore_eos": False, "stop_token_ids": [7]}],
    ]


def test_an_environment_without_vllm(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # no site, no packages
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(PeerError, match="has no vLLM: install it there"):
        VllmPeer(tmp_path / "python", SETTINGS, threads=1)
