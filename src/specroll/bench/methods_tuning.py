"""FastGRPO's best settings on this machine, for one form of batch: its rule's constants, one after the other.

Each constant is tried at a few values, the authors' own among them, with what was found best for those before it. All
tries sample the same few batches as plain decoding does, in turn; the best one has most tokens per second over plain
decoding's. The drafter is the given one and does not learn meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from specroll.bench.compare import Rates, System, interleave
from specroll.bench.methods import Setting
from specroll.build import make_requests
from specroll.config import EngineConfig, TrainConfig
from specroll.engine import Engine
from specroll.model.load import load_model
from specroll.rivals.fastgrpo import FastGRPO
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import load_drafter
from specroll.train.data import Task
from specroll.train.run import lora, rows_in_order
from specroll.types import Request, SamplingParams

GRID: Mapping[str, tuple[int, ...]] = {
    "capacity": (8, 16, 32, 48, 64, 160),
    "most_rows": (4, 8, 16, 160),
    "least_depth": (1, 2, 3, 4),
    "most_branches": (2, 4, 8),
}
PLAIN = "plain"
_PROMPTS = 2  # of a try, in batches of the setting's form; one batch where that has more
_SEED = 1 << 30  # not that of any training

Timed = Callable[[Mapping[str, FastGRPOConfig | None]], Mapping[str, Rates]]
"""The rates of named settings, all in turn; None is plain decoding."""


def rollouts(setting: Setting) -> int:
    """How many a tuning takes: of each constant all values but the best one so far, which is known, and plain ones."""
    return _batches(setting) * (1 + sum(map(len, GRID.values())))


def _batches(setting: Setting) -> int:
    return -(-_PROMPTS // setting.prompts)


def tune(setting: Setting, config: TrainConfig, task: Task, on_run: Callable[[str, float], None]) -> dict[str, Any]:
    """What `search` finds for a training of this setting; `on_run` gets the name and rate of each rollout."""
    assert setting.drafter is not None
    model, tokenizer = load_model(config.model, dtype=config.dtype)
    if (adapter := lora(config.lora_rank)) is not None:  # passes are to cost what they do in the training
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    batches = _requests(setting, config, task, tokenizer)
    sampling = SamplingParams(temperature=config.temperature, top_p=config.top_p, seed=_SEED)
    plain = Engine(model, tokenizer, config=EngineConfig(max_running=setting.running))
    plain.generate(batches[0], sampling)  # weights are packed before anything is timed
    causal = plain.target.causal
    drafter = load_drafter(setting.drafter, causal)

    def sample(engine: Engine, repeat: int) -> int:
        return engine.generate(batches[repeat], sampling).tokens

    def system(tried: FastGRPOConfig | None) -> System:
        if tried is None:
            return partial(sample, plain)
        rival = FastGRPO.for_model(causal, drafter, tried)
        rival.proposer.context.keeps = False
        engine = Engine(model, tokenizer, proposer=rival.proposer, rule=rival.rule, config=plain.config)
        engine.target = plain.target
        return partial(sample, engine)

    def timed(some: Mapping[str, FastGRPOConfig | None]) -> Mapping[str, Rates]:
        return interleave({name: system(tried) for name, tried in some.items()}, len(batches), 0, on_run)

    return search(timed)


def search(timed: Timed) -> dict[str, Any]:
    """`settings`, the best ones, `over_plain`, their rate over plain decoding's, and all that was `tried`."""
    best, most = FastGRPOConfig(), 0.0
    tried: list[dict[str, Any]] = []
    for name, values in GRID.items():
        some = {f"{name} {value}": replace(best, **{name: value}) for value in values}
        if tried:
            some = {label: config for label, config in some.items() if config != best}
        rates = timed({PLAIN: None, **some})
        for label, config in some.items():
            both = zip(rates[label].tokens_per_second, rates[PLAIN].tokens_per_second, strict=True)
            over = statistics.mean(rate / plain for rate, plain in both)
            tried.append({**_told(config), "tokens_per_second": rates[label].median, "over_plain": over})
            if over > most:
                best, most = config, over
    return {"settings": _told(best), "over_plain": most, "tried": tried}


def _told(config: FastGRPOConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in GRID}


def _requests(setting: Setting, config: TrainConfig, task: Task, tokenizer: Any) -> list[list[Request]]:
    count, each = _batches(setting), setting.prompts
    rows = rows_in_order(task.dataset, count * each, _SEED)
    prompts = list(rows["prompt"])
    return [
        make_requests(
            tokenizer,
            prompts[start : start + each],
            samples=setting.generations,
            max_new_tokens=config.max_completion,
        )
        for start in range(0, count * each, each)
    ]
