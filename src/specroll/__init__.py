"""Exact speculative rollouts for reinforcement learning of language models.

The public names, each loaded on first use: `import specroll` itself imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specroll.config import BudgetConfig, EngineConfig, HeadsConfig
    from specroll.engine import Engine
    from specroll.model.load import load_model
    from specroll.types import Completion, Request, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "BudgetConfig",
    "Completion",
    "Engine",
    "EngineConfig",
    "HeadsConfig",
    "Request",
    "SamplingParams",
    "load_model",
]

_HOME = {
    "BudgetConfig": "specroll.config",
    "Completion": "specroll.types",
    "Engine": "specroll.engine",
    "EngineConfig": "specroll.config",
    "HeadsConfig": "specroll.config",
    "Request": "specroll.types",
    "SamplingParams": "specroll.types",
    "load_model": "specroll.model.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specroll' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
