"""The rollout engine: scheduling, rounds and what they cost."""

from specroll.engine.engine import Engine, Rollout

__all__ = ["Engine", "Rollout"]
