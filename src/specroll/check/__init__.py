"""Proof by equality, on anybody's model: speculation on = off = transformers' own greedy `generate` fed with our noise.

Also how far the log-probabilities that a rollout returns are from those of one full forward pass, which is what a
trainer computes. Where tokens differ, says whether rounding decided.
"""

from specroll.check.compare import Comparison, Difference
from specroll.check.run import CheckReport, check

__all__ = ["CheckReport", "Comparison", "Difference", "check"]
