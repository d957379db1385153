"""What a training came to, measured on the policy itself: reward on held-out prompts, and speed with and without heads.

Knows the engine and a task's rewards; nothing of how the policy was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from specroll.engine import Engine, Rollout
from specroll.train.data import Task
from specroll.train.rollout import sample_name
from specroll.types import Completion, Request, SamplingParams

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second at one number of running sequences, medians over interleaved repeats of the same requests.

    `ratio` is the median of the repeats' own ratios; `differing_tokens` counts where the two decodings disagree.
    """

    running: int
    plain: float
    speculative: float
    ratio: float
    tokens_per_round: float
    differing_tokens: int


def requests_of(task: Task, tokenizer: Any, samples: int, max_new_tokens: int) -> list[Request]:
    """`samples` requests for each row, side by side, with names that no training uses."""
    ids: list[list[int]] = tokenizer.apply_chat_template(
        list(task.dataset["prompt"]), add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    prompts = [tuple(row) for row in ids for _ in range(samples)]
    return [
        Request(
            prompt_ids=prompt,
            sample=sample_name(eval=True, step=0, call=0, rank=0, row=row),
            max_new_tokens=max_new_tokens,
        )
        for row, prompt in enumerate(prompts)
    ]


def mean_reward(task: Task, tokenizer: Any, completions: Sequence[Completion], samples: int) -> float:
    """Mean over completions of the sum of the task's rewards; row i of the task has `samples` completions."""
    rows = [row for row in range(len(task.dataset)) for _ in range(samples)]
    columns = {key: [task.dataset[key][row] for row in rows] for key in task.dataset.column_names}
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = columns.pop("prompt")
    scores = [reward(prompts=prompts, completions=messages, **columns) for reward in task.reward_funcs]
    return sum(map(sum, scores)) / len(rows)


def evaluate(
    engine: Engine, task: Task, tokenizer: Any, sampling: SamplingParams, samples: int, max_new_tokens: int
) -> float:
    """Mean reward of the present policy, by the law that it trains with. Equal seeds make two policies comparable."""
    rollout = engine.generate(requests_of(task, tokenizer, samples, max_new_tokens), sampling)
    return mean_reward(task, tokenizer, rollout.completions, samples)


def compare_speed(
    engine: Engine, requests: Sequence[Request], sampling: SamplingParams, running: int, repeats: int = REPEATS
) -> Speed:
    """The same requests with and without the engine's proposer, in turn, after one unmeasured turn."""
    proposer, config = engine.proposer, engine.config
    pairs: list[tuple[Rollout, Rollout]] = []
    engine.config = replace(config, max_running=running)
    try:
        for _ in range(1 + repeats):
            engine.proposer = None
            plain = engine.generate(requests, sampling)
            engine.proposer = proposer
            pairs.append((plain, engine.generate(requests, sampling)))
    finally:
        engine.proposer, engine.config = proposer, config
    measured = pairs[1:]
    rates = [tuple(r.tokens / r.seconds for r in pair) for pair in measured]
    plain, spec = measured[-1]
    return Speed(
        running=running,
        plain=median(p for p, _ in rates),
        speculative=median(s for _, s in rates),
        ratio=median(s / p for p, s in rates),
        tokens_per_round=median(spec.tokens_per_round for _, spec in measured),
        differing_tokens=sum(differing(a, b) for a, b in zip(plain.completions, spec.completions, strict=True)),
    )


def differing(one: Completion, other: Completion) -> int:
    """Tokens of the longer completion that the other one does not have in the same place."""
    same = sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=False))
    return max(len(one.token_ids), len(other.token_ids)) - same
