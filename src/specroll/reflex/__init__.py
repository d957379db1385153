"""Reflex: what a trajectory has shown so far corrects what is proposed next. Proposals only, never a draw."""

from specroll.reflex.corrector import Corrector, Recall, Setting
from specroll.reflex.forms import corrector
from specroll.reflex.gate import Gate

__all__ = ["Corrector", "Gate", "Recall", "Setting", "corrector"]
