"""What proposers remember, on disk: a safetensors file whose header says in JSON whose it is. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specroll.files import write_atomic

FORMAT = 1


def write(path: Path, kind: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
    """`kind`: whose tensors they are; `about`: what else there is to say of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {kind: json.dumps({"format": FORMAT, **about})}
    write_atomic(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata=header))


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` wrote. Raises ValueError where there is nothing, or nothing usable."""
    try:
        with safe_open(path, "pt") as file:
            about = dict(json.loads((file.metadata() or {})[kind]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except FileNotFoundError as error:
        raise ValueError(f"no {kind} at {path}: the file is not there; start without it") from error
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise ValueError(f"{path} holds no usable {kind} ({error}); delete it to start without them") from error
    if about.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads; delete it to start without it")
    return tensors, about
