"""The slow path: heads learn between rollouts, at first from nothing, later seldom and at a bounded cost."""
