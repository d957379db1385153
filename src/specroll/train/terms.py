"""What a TRL trainer asks of a rollout, read from its settings; what cannot be kept exactly is refused by name.

Knows the trainer; no engine and no heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from specroll.types import SamplingParams

if TYPE_CHECKING:
    from trl import GRPOTrainer

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "repetition_penalty": (1.0, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "stop_strings": (),
}


def sampling_of(trainer: GRPOTrainer) -> tuple[SamplingParams, tuple[str, ...]]:
    """The law and stop strings that the trainer asks for. Raises ValueError, by name, for what is not exact."""
    args: Any = trainer.args  # a GRPOConfig, typed by its base class
    if args.repetition_penalty not in (1.0, None):
        raise ValueError(
            f"repetition_penalty={args.repetition_penalty} makes each draw depend on the tokens before it, which exact "
            "speculative rollouts do not support: set repetition_penalty=1.0"
        )
    if args.use_vllm:
        raise ValueError("use_vllm=True loads a second engine that this rollout replaces: set use_vllm=False")
    if trainer.tools:
        raise ValueError(
            "tools and environments are not supported by this rollout: train without them, or use TRL's own"
        )
    extra = dict(args.generation_kwargs or {})
    for name, value in extra.items():
        if name not in _NEUTRAL or (_NEUTRAL[name] and value not in _NEUTRAL[name]):
            raise ValueError(
                f"generation_kwargs has {name}={value!r}, which this rollout does not support (only stop_strings): "
                "remove it. Temperature, top_p, top_k, min_p and lengths are arguments of GRPOConfig"
            )
    stop = extra.get("stop_strings") or ()
    sampling = SamplingParams(
        temperature=args.temperature, top_k=args.top_k or 0, top_p=args.top_p, min_p=args.min_p or 0.0, seed=args.seed
    )
    return sampling, (stop,) if isinstance(stop, str) else tuple(stop)


def unwrapped(trainer: GRPOTrainer) -> nn.Module:
    """The model under DDP and compilation, keeping the trainer's mixed-precision forward, so that both compute alike.

    Raises ValueError for sharded models and for models that are not text only.
    """
    from transformers import PreTrainedTokenizerBase

    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    sharded = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed ZeRO-3": trainer.is_deepspeed_enabled and plugin is not None and plugin.zero_stage == 3,
    }
    for name, used in sharded.items():
        if used:
            raise ValueError(
                f"{name} shards the weights over devices, which rollouts do not support yet: use DDP or ZeRO-1/2"
            )
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        kind = type(trainer.processing_class).__name__
        raise ValueError(f"{kind} is for images or sound; rollouts are text only: pass a tokenizer")
    return trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)


def tokenize(prompts: Sequence[Any], trainer: GRPOTrainer) -> list[list[int]]:
    """Token ids of prompts, strings or messages, as the trainer's own generation would make them."""
    tokenizer: Any = trainer.processing_class
    settings: Any = trainer.chat_template_kwargs or {}
    if isinstance(prompts[0], str):
        return tokenizer(text=list(prompts))["input_ids"]
    return tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **settings,
    )["input_ids"]


def check_fit(prompt_ids: list[list[int]], trainer: GRPOTrainer, limit: int | None) -> None:
    """Raise ValueError for an empty prompt, and for one too long for the model's `limit` of positions."""
    args: Any = trainer.args
    new = int(args.max_completion_length or 0)
    for row, ids in enumerate(prompt_ids):
        if not ids:
            raise ValueError(f"prompt {row} of this batch is empty: every prompt needs at least one token")
        if limit and len(ids) + new > limit:
            start = repr(trainer.processing_class.decode(ids[:12]))  # type: ignore[union-attr]
            raise ValueError(
                f"prompt {row} of this batch (it begins {start}) has {len(ids)} tokens; with "
                f"max_completion_length={new} that is more than the model's {limit} positions: drop or shorten it, "
                f"or set max_completion_length <= {max(limit - len(ids), 0)}"
            )
