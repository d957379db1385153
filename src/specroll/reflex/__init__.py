"""Reflex: what a trajectory has shown so far corrects what is proposed next. Proposals only, never a draw."""

from specroll.reflex.associative import AssociativeMemory, Recall

__all__ = ["AssociativeMemory", "Recall"]
