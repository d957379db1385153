"""A world that heads can know: texts of a Markov chain, where the root decides the next token's law."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specroll.types import Trajectory

VOCAB, LETTERS, WIDTH = 24, 12, 16


def markov_model() -> LlamaForCausalLM:
    """Its embedding and lm_head are what heads read; nothing is sampled from it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def law_of(chain: int) -> Tensor:
    successor_V = torch.randperm(LETTERS, generator=torch.Generator().manual_seed(chain))
    law_VV = torch.full((LETTERS, LETTERS), 0.2 / (LETTERS - 1))
    law_VV[torch.arange(LETTERS), successor_V] = 0.8
    return law_VV


def responses(seed: int, chain: int, told: int | None = None, *, count: int = 20, length: int = 30) -> list[Trajectory]:
    """Texts of a chain; the laws that are recorded are those of the chain `told`, if another. States tell nothing."""
    generator = torch.Generator().manual_seed(seed)
    law_VV, told_VV = law_of(chain), law_of(chain if told is None else told)
    trajectories = []
    for _ in range(count):
        tokens = [int(torch.randint(LETTERS, (1,), generator=generator))]
        while len(tokens) < length:
            tokens.append(int(torch.multinomial(law_VV[tokens[-1]], 1, generator=generator)))
        trajectories.append(
            Trajectory(
                hidden_TH=torch.randn(length, WIDTH, generator=generator).bfloat16(),
                token_T=torch.tensor(tokens),
                top_token_TC=torch.arange(LETTERS).expand(length, -1),
                top_logp_TC=told_VV[torch.tensor([tokens[0], *tokens[:-1]])].log(),
            )
        )
    return trajectories
