"""Proposers: they guess what the target will draw. A wrong guess costs time, never correctness."""
