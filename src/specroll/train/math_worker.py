"""The process that runs math-verify, apart from the trainer's. `rewards` starts it; it imports nothing of specroll.

A model writes what no one foresees: `9^{9^{9^9}}` keeps a computer algebra system busy for ever, or takes all memory.
A process of its own can be limited and ended, from any thread, where a signal cannot.

Says "ready" first. Then one JSON object per line in, {"gold": ..., "text": ...}; "1" or "0" per line out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
from typing import Any

from math_verify import parse, verify

LIMIT_S = 2  # for each of: parse the text, parse the gold answer, compare
MEMORY = 2 << 30


@functools.lru_cache(maxsize=256)
def parse_gold(gold: str) -> Any:
    return parse(rf"\boxed{{{gold}}}", parsing_timeout=LIMIT_S)


def agrees(gold: str, text: str) -> bool:
    """Whether math-verify finds the last expression of `text` equal to `gold`. What cannot be read is not equal."""
    try:
        return bool(verify(parse_gold(gold), parse(text, parsing_timeout=LIMIT_S), timeout_seconds=LIMIT_S))
    except Exception as error:  # a parser of free text may fail in any way; the text is then a wrong answer
        logging.getLogger(__name__).debug("math-verify failed on %r: %r", text, error)
        return False


def main() -> None:
    # math-verify logs each text that it cannot read or that takes too long. To a model in training that is normal.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    with contextlib.suppress(ImportError):  # no such limit on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # whatever a library prints must not be taken for an answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(int(agrees(asked["gold"], asked["text"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
