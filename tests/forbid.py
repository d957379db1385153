"""Notices what would make the host wait for the device, on a device that never makes it wait."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Forbid(TorchDispatchMode):
    """Fails on what a stream capture cannot hold: to ask the device for a value, or to bring one from the host."""

    ASKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in self.ASKS or name == "lift_fresh":
            raise RuntimeError(f"{name} in a recorded pass")
        if name in ("index", "index_put_", "index_put") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        ):
            raise RuntimeError("a boolean index in a recorded pass")
        with self:  # in inference mode what consists of other operations arrives as it is
            parts = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if parts is NotImplemented else parts
