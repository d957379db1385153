"""Models and a tokenizer small enough for any test, built in code: nothing is downloaded and nothing is random.

The weights are drawn wide enough that the distributions are neither flat nor one-hot, that attention prefers some
positions, and that every norm and bias does something: a bug in any of them changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from specroll.propose.heads import FutureHeads

VOCAB_SIZE = 61
PAD, EOS, UNKNOWN = 0, 1, 2
SLIDING_WINDOW = 8

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": UNKNOWN,
}

# Where an architecture leaves its heads' width free, it is not hidden_size / heads: code that assumes so must fail.
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": partial(LlamaConfig, **SHAPE),
    "qwen2": partial(Qwen2Config, **SHAPE),
    "qwen3": partial(Qwen3Config, **SHAPE, head_dim=16),
    "mistral": partial(MistralConfig, **SHAPE, head_dim=16, sliding_window=SLIDING_WINDOW),
    "phi3": partial(Phi3Config, **SHAPE),
    "gemma3": partial(
        Gemma3TextConfig,
        **{**SHAPE, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
}
ARCHITECTURES = tuple(_CONFIGS)


def tiny(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model in eval mode; the same weights for the same architecture, seed and dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_CONFIGS[architecture]())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms start at one (or zero) and biases at zero: move all of them
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: lower-case letters, digits, blanks and punctuation; everything else is unknown."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!+-*/=()<>'\"_#%"
    tokens = ["<pad>", "<eos>", "<unk>", *characters]
    assert len(tokens) == len(set(tokens)) == VOCAB_SIZE
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def tiny_heads() -> FutureHeads:
    """Heads of the tiny Llama that propose something, with a draft vocabulary."""
    heads = FutureHeads.for_model(tiny("llama"), vocabulary=torch.arange(2, 50))
    torch.nn.init.normal_(heads.second_BHF, std=0.3, generator=torch.Generator().manual_seed(0))
    return heads
