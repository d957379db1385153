"""Training: tasks and rewards, and the door to TRL. The loop is TRL's; what is ours is where its samples come from."""
