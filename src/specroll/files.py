"""Files that are whole or not there. Knows nothing of what is in them."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, payload: bytes) -> None:
    """Write beside the target and rename: readers see the old file or the whole new one, whatever interrupts."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
