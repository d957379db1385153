"""Reflex: what a trajectory has shown so far corrects what is proposed next. Proposals only, never a draw."""

from specroll.reflex.associative import AssociativeMemory, Recall
from specroll.reflex.gate import Gate

__all__ = ["AssociativeMemory", "Gate", "Recall"]
