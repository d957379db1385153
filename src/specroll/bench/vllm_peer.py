"""vLLM as a rival in a process of its own: `python -I vllm_peer.py`, with the Python of an environment that has vLLM.

Imports nothing of specroll, which is not installed there. Speaks JSON lines; `peer.py` is the other end:

    in   {"model", "dtype", "max_model_len", "max_num_seqs", "temperature", "top_p"}     once
    out  {"vllm": version}, as soon as it can answer; {"missing": "vllm"} where there is none
    in   {"rows": [[token id, ...], ...], "tokens": n, "stop_ids": [...], "seed": s}     without stop_ids, no row ends
    out  {"tokens": made by all rows, stop ids included, "seconds": spent on them}

Between two requests it waits for a line, with nothing running. It ends with its standard input.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    # vLLM prints to standard output as well: whatever is not an answer goes where the log goes.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        settings = json.loads(sys.stdin.readline())
        if importlib.util.find_spec("vllm") is None:
            _say(answers, {"missing": "vllm"})
            return
        import vllm  # pyright: ignore[reportMissingImports] - it is in the other environment

        llm = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            skip_tokenizer_init=True,
            seed=0,
        )
        law = {"temperature": settings["temperature"], "top_p": settings["top_p"]}
        # A processor without the instructions that the build uses is found out here, not amid a measurement.
        _answer(vllm, llm, law, {"rows": [[1, 2]], "tokens": 2, "stop_ids": [], "seed": 0})
        _say(answers, {"vllm": vllm.__version__})
        for line in sys.stdin:
            _say(answers, _answer(vllm, llm, law, json.loads(line)))


def _answer(vllm: Any, llm: Any, law: dict[str, float], request: dict[str, Any]) -> dict[str, float]:
    import torch

    stop_ids = request["stop_ids"]
    params = vllm.SamplingParams(
        **law, max_tokens=request["tokens"], ignore_eos=not stop_ids, stop_token_ids=stop_ids, detokenize=False
    )
    # One generator for all rows, as by default: a seed of each row's own would make vLLM draw row by row.
    torch.manual_seed(request["seed"])
    # A policy in training has other weights in each rollout, so nothing may be remembered from the one before.
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": row} for row in request["rows"]], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
