"""The drafter's network: one decoder layer of the target's own kind that foretells the target's next last hidden state.

At position t it sees the target's state there and the token that this state drew, and predicts the next state:

    x_t = h_t + W [h_t, norm(E(x_{t+1}))] + b,        f_t = norm(layer(x_0 .. x_t)),        f_t ~ h_{t+1},

so that lm_head(f_t) foretells the token after next. Deeper tokens are drafted from the drafter's own f in the place of
h. Embedding and lm_head are the target's, read and never moved. The layer and what surrounds it are the installed
transformers' own, made from the target's configuration with one layer; none of it is written here.

This is EAGLE's network (Li et al., arXiv 2401.15077) with three things that FastGRPO's code or the length of our fits
ask for: the state is added to the fused input, as in FastGRPO; the last norm starts as the target's; embeddings are
brought to RMS 1, as a step of 1e-4 moves next to nothing where inputs are a hundredth of that. FastGRPO's code has
gated layers for the fusion and behind attention, of the same order of parameters.

N  packed rows    H  hidden width
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specroll.model.attention import NAME, Pass
from specroll.propose.heads import rms_norm
from specroll.propose.readout import output_layer

_STD = 0.02


class Drafter(nn.Module):
    """Float32, always in evaluation mode: there is nothing in it that behaves otherwise while it learns."""

    def __init__(self, hidden_size: int, body: nn.Module) -> None:
        """`body`: a transformers decoder of one layer, without an embedding. See `for_model`."""
        super().__init__()
        self.hidden_size = hidden_size
        self.fuse = nn.Linear(2 * hidden_size, hidden_size)
        self.body: Any = body

    @classmethod
    def for_model(cls, model: PreTrainedModel, *, seed: int = 0) -> Drafter:
        """An untrained drafter that fits `model`, on its device."""
        decoder = model.get_decoder()
        hidden_size = output_layer(model).weight.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body: Any = type(decoder)(one_layer(model.config.get_text_config()))
            drafter = cls(hidden_size, body)
            nn.init.normal_(drafter.fuse.weight, std=_STD)
            nn.init.zeros_(drafter.fuse.bias)
        body.set_input_embeddings(None)  # the target's own is used
        body.config._attn_implementation = NAME
        around = {name: weight for name, weight in decoder.named_parameters() if not name.startswith("layers.")}
        with torch.no_grad():
            for name, parameter in body.named_parameters():
                if name in around:
                    parameter.copy_(around[name])
        return drafter.float().to(model.device).eval()

    def forward(self, hidden_NH: Tensor, embedding_NH: Tensor, position_N: Tensor, rows: Pass) -> Tensor:
        """The foretold next states [N, H] behind states, and the embeddings of the tokens that these drew."""
        fused_NH = self.fuse(torch.cat((hidden_NH, rms_norm(embedding_NH)), dim=-1))
        out = self.body(
            inputs_embeds=(hidden_NH + fused_NH)[None],
            position_ids=position_N[None],
            attention_mask=None,
            use_cache=False,
            specroll_pass=rows,
        )
        return out.last_hidden_state[0]


def one_layer(config: Any) -> Any:
    """The configuration of a decoder like this one with one layer, which attends to everything, and no vocabulary."""
    config = deepcopy(config)
    config.num_hidden_layers = 1
    config.vocab_size, config.pad_token_id = 1, None
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None
    return config
