"""From names to objects: model, tokenizer, heads and engine in one call, and prompts as the engine's requests.

The command line and the README's example stand on this; whoever has the objects already builds `Engine` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specroll.config import PROPOSERS, BudgetConfig, BudgetRuleName, EngineConfig, ReflexName, proposer_names
from specroll.engine import Engine
from specroll.model.load import load_model
from specroll.propose import catalog
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.propose.store import load_heads
from specroll.types import Proposer, Request

Message = dict[str, str]

BUDGET, ENGINE = BudgetConfig(), EngineConfig()
_MOST_SAMPLES = 1 << 20


def build_engine(
    model: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    heads: str | Path | FutureHeads | None = None,
    proposers: str | None = None,
    max_nodes: int = BUDGET.max_nodes,
    rule: BudgetRuleName = BUDGET.rule,
    fixed_nodes: int | None = None,
    reflex: ReflexName = BUDGET.reflex,
    max_running: int = ENGINE.max_running,
    dtype: torch.dtype | str = "auto",
) -> Engine:
    """An engine that is ready to generate.

    Args:
        model: a local folder, a hub name, None for the default model, or a model that is loaded already (then give its
            `tokenizer` too, if text or stop strings are wanted).
        heads: a folder that `specroll heads fit` wrote, or heads.
        proposers: what proposes, separated by commas: "heads", "suffix", or a class of your own as "module:Class". By
            default heads, if there are any; else decoding is plain.
        max_nodes: most proposed tokens per sequence and round; how many pay is decided in each round.
        rule: "optimal" decides that by what pays; "paper" is the published rule, a baseline to compare with.
        fixed_nodes: propose exactly so many in every round, whether it pays or not.
        reflex: "associative" lets the trajectory's own tokens correct what heads propose, "hidden" lets its past errors
            move the heads' states (the published form); "off" leaves heads alone.
        max_running: sequences decoded together.
        dtype: of a model loaded by name.

    Raises ValueError for a model that cannot be loaded or run exactly, for heads of another model, and for proposers
    that are not there.
    """
    budget = BudgetConfig(max_nodes=max_nodes, rule=rule, fixed_nodes=fixed_nodes, reflex=reflex)

    def heads_proposer(model: PreTrainedModel, tokenizer: Any) -> Proposer:
        assert heads is not None
        ready = heads if isinstance(heads, FutureHeads) else load_heads(heads, model)
        return HeadsProposer(ready, model, ranking=budget.ranking, reflex=budget.reflex)

    if proposers is None:
        proposers = PROPOSERS if heads is not None else None
    names = () if proposers is None else proposer_names(proposers)
    if ("heads" in names) != (heads is not None):
        raise ValueError(
            "heads that propose have to be named among the proposers and given as heads; got one of the two"
        )
    makers = [heads_proposer if name == "heads" else catalog.find(name) for name in names]
    if model is None or isinstance(model, str | Path):
        model, loaded = load_model(None if model is None else str(model), dtype=dtype)
        tokenizer = tokenizer or loaded
    engine = Engine(model, tokenizer, config=EngineConfig(max_running=max_running), budget=budget)
    target = engine.target
    engine.proposer = catalog.together([make(target.causal, tokenizer) for make in makers], target.vocab_size)
    return engine


def make_requests(
    tokenizer: Any,
    prompts: Sequence[str | Sequence[Message]],
    *,
    samples: int = 1,
    max_new_tokens: int = 256,
    chat: bool = True,
) -> list[Request]:
    """`samples` requests per prompt, the samples of a prompt side by side.

    A prompt is a text or a list of chat messages. With `chat`, a text is put to the model as the user's message, if
    the tokenizer has a chat template; else it is continued as it stands. Sample i of prompt j has the same noise
    whatever `samples` is.
    """
    if not 1 <= samples <= _MOST_SAMPLES:
        raise ValueError(f"samples must be in [1, {_MOST_SAMPLES}], got {samples}")
    return [
        Request(prompt_ids=ids, sample=index * _MOST_SAMPLES + member, max_new_tokens=max_new_tokens)
        for index, ids in enumerate(encode(tokenizer, prompts, chat=chat))
        for member in range(samples)
    ]


def encode(tokenizer: Any, prompts: Sequence[str | Sequence[Message]], *, chat: bool = True) -> list[tuple[int, ...]]:
    """Token ids of prompts, as `make_requests` reads them. Raises ValueError for what is no text and no messages."""
    if isinstance(prompts, str):
        raise ValueError("prompts is one text: give a list, [text]")
    return [_encode(tokenizer, _checked(prompt, number), chat) for number, prompt in enumerate(prompts, 1)]


def _checked(prompt: Any, number: int) -> Any:
    """The prompt, if it is a text or messages that a tokenizer can read."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"prompt {number} is {prompt!r}: give a text or a list of chat messages")
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not (isinstance(role, str) and isinstance(content, str)):
            raise ValueError(f'prompt {number} holds {message!r}: a message is {{"role": text, "content": text}}')
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt {number} is not valid UTF-8 ({error.reason}, character {error.start + 1}): save it as UTF-8"
            ) from error
    return prompt


def _encode(tokenizer: Any, prompt: str | Sequence[Message], chat: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if not (chat and tokenizer.chat_template):
            return tuple(tokenizer(prompt)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompt is a list of messages, but the tokenizer has no chat template: give the prompt as text, or "
            "set tokenizer.chat_template"
        )
    return tuple(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))
