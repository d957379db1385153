"""Verification: the target's own draws, followed while the tree agrees. Never learns where a draft came from."""

from specroll.verify.walk import walk

__all__ = ["walk"]
