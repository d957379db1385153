"""The policy: which model it is (`load`), and how the engine calls it (`target`, with `attention` and `cache`)."""
