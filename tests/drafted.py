"""Tiny rollouts that a drafter follows, and what it should have seen of them by the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll.engine import Engine, Rollout
from specroll.model.attention import PromptPass
from specroll.propose.readout import embed
from specroll.rivals.context import Passage
from specroll.rivals.eagle import Drafter
from specroll.rivals.learn import passages_of, pretrain
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Request, SamplingParams
from tiny import tiny

SAMPLING = SamplingParams(seed=7, top_p=0.95)
PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (7, 8, 9, 10, 11, 12, 13, 14, 15, 16), (20,), (3, 4, 5, 6), (20,)]
QUICK = FastGRPOConfig(fit_learning_rate=1e-2)


def requests(tokens: int = 8, step: int = 2) -> list[Request]:
    return [Request(prompt_ids=p, sample=100 + i, max_new_tokens=tokens + step * i) for i, p in enumerate(PROMPTS)]


def tokens_of(rollout: Rollout) -> dict[int, list[int]]:
    return {c.sample: c.token_ids for c in rollout.completions}


@cache
def plain(architecture: str) -> tuple[PreTrainedModel, Rollout]:
    """A model and what it says to `requests()` without speculation."""
    model = tiny(architecture)
    return model, Engine(model, eos_ids=[]).generate(requests(), SAMPLING)


def recorded(model: PreTrainedModel, wanted: Sequence[Request]) -> list[Passage]:
    _, trajectories = Engine(model, eos_ids=[]).record(wanted, SAMPLING)
    return passages_of(model, trajectories, [r.prompt_ids for r in wanted])


@cache
def taught_state(architecture: str) -> dict[str, Tensor]:
    model, _ = plain(architecture)
    drafter = Drafter.for_model(model)
    pretrain(drafter, model, recorded(model, requests()), updates=30, config=QUICK)
    return drafter.state_dict()


def drafter_of(architecture: str, *, taught: bool) -> Drafter:
    drafter = Drafter.for_model(plain(architecture)[0], seed=1)
    if taught:
        drafter.load_state_dict(taught_state(architecture))
    return drafter


@torch.no_grad()
def seen_by(model: PreTrainedModel, token_T: Sequence[int]) -> Tensor:
    """The model's last hidden states, [T, H], by its own forward."""
    return model.get_decoder()(input_ids=torch.tensor([list(token_T)]), use_cache=False).last_hidden_state[0]


@torch.no_grad()
def from_scratch(drafter: Drafter, model: PreTrainedModel, hidden_TH: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
    """The drafter over all pairs in one pass: its states [T, H], and its keys and values [2, head, T, width]."""
    count = token_T.shape[0]
    config = drafter.body.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = torch.empty(1, 2, config.num_key_value_heads, count, width)
    state_TH = drafter(hidden_TH, embed(model, token_T), torch.arange(count), PromptPass([count], kv))
    return state_TH, kv[0]
