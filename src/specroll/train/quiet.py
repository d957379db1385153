"""Silence of the packages that do the work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Only our own lines on the screen: no logs, progress bars and deprecations of the packages that do the work."""
    from datasets import utils as datasets_utils
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets_utils.disable_progress_bars()
    for name in ("accelerate", "datasets", "peft", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for name in ("transformers", "trl", "peft", "torch", "accelerate", "datasets"):
            warnings.filterwarnings("ignore", module=name)
        yield
