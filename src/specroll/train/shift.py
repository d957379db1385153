"""A change in the middle of a training: other prompts from some step on, and other weights under the policy.

A controlled case: nobody trains so, but what a change of policy costs a drafter can be measured only where it is known
when it came. Knows tasks and weights; no trainer and no rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from specroll.model.target import unwrap
from specroll.train.data import Task
from specroll.train.run import rows_in_order

Reward = Callable[..., list[float]]

# What may differ between two folders of one architecture.
_NOT_SHAPE = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def in_turn(phases: Sequence[tuple[Task, int]], seed: int) -> tuple[Dataset, Reward]:
    """So many rows of the first task, then of the next one, as one data set, and the rewards of each row's own task.

    A batch must not hold rows of two tasks.
    """
    parts: list[list[dict[str, Any]]] = [
        rows_in_order(task.dataset, count, seed).to_list()  # type: ignore[misc]
        for task, count in phases
    ]
    columns = sorted({column for part in parts for row in part for column in row})
    rows = [{c: row.get(c) for c in columns} | {"phase": number} for number, part in enumerate(parts) for row in part]

    def reward(phase: Sequence[int], **given: Any) -> list[float]:
        (number,) = set(phase)
        scores = [score(**given) for score in phases[number][0].reward_funcs]
        return [sum(of_one) for of_one in zip(*scores, strict=True)]

    return Dataset.from_list(rows), reward


def check_alike(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Raise ValueError unless `model` can take the weights of `other`, with the first thing in which they differ."""
    mine, theirs = _shape(model), _shape(other)
    unlike = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"the policy cannot take the other model's weights: its {name} is {mine.get(name)}, there it is "
            f"{theirs.get(name)}. Name a folder of the same architecture, such as one that was trained from this model"
        )


@torch.no_grad()
def take_weights(model: nn.Module, other: PreTrainedModel) -> bool:
    """Give a policy the other's weights, in place; adapters around its layers stay as they are.

    Returns whether what heads share with a policy has changed: its input embedding or its lm_head.
    """
    causal: Any = unwrap(model)
    shared = (causal.get_input_embeddings().weight, causal.get_output_embeddings().weight)
    before = [weight.clone() for weight in shared]
    mine, theirs = _weights(causal), _weights(other)
    if mine.keys() != theirs.keys():
        raise ValueError(f"the policies have other weights: {', '.join(sorted(mine.keys() ^ theirs.keys())[:3])}")
    for name, weight in mine.items():
        weight.copy_(theirs[name])
    return not all(torch.equal(weight, old) for weight, old in zip(shared, before, strict=True))


def _weights(causal: nn.Module) -> dict[str, Tensor]:
    """By the names that they have without adapters; weights that are one have one name."""
    return {name.replace(".base_layer", ""): p for name, p in causal.named_parameters() if ".lora_" not in name}


def _shape(model: PreTrainedModel) -> dict[str, Any]:
    """What two models of one architecture have in common."""
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in _NOT_SHAPE and not name.startswith("_") and not name.endswith("_token_id")
    }
    return config | {name: tuple(weight.shape) for name, weight in _weights(model).items()}
