"""The front door: `import specroll` is quick, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import specroll

_IMPORT = """
import sys, time
start = time.process_time()
import specroll
seconds = time.process_time() - start
heavy = {"torch", "transformers", "trl", "numpy"} & set(sys.modules)
assert not heavy, f"import specroll also imports {heavy}"
assert seconds < 0.3, f"import specroll takes {seconds:.2f} s"
"""


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", specroll.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(specroll, name).__name__ == name
    assert name in dir(specroll)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = specroll.Engin  # pyright: ignore[reportAttributeAccessIssue]
