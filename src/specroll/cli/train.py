"""`specroll train`: GRPO with speculative rollouts, from a model's name to a trained adapter."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from specroll.cli.common import check_writable, find_own_modules
from specroll.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """Train a model with GRPO on exact speculative rollouts.

    A run lives in a folder: options, one record per step, checkpoints, the trained adapter and the heads.
    Ctrl-C saves it; --resume FOLDER goes on exactly where it stopped.
    """

    resume: Path | None = None
    """Go on with the run in this folder, with its own options (only --steps may be given anew; proposers of your own
    have to be named again)."""
    json: Path | None = None
    """Write the summary to this file as well (keys: docs/commands.md)."""


def main(options: Options) -> int:
    # A run is made of local files and its own records; nobody is told of it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from specroll.report.records import to_json
    from specroll.train.resume import resumed

    check_writable(options.json)
    find_own_modules(options.proposers)
    config = TrainConfig(**{field.name: getattr(options, field.name) for field in fields(TrainConfig)})
    if options.resume is not None:
        resumed(config, options.resume)  # its errors come before PyTorch is loaded, which takes a while
    from specroll.train.run import train

    summary = train(config, resume=options.resume, command="specroll " + " ".join(sys.argv[1:]))
    if options.json is not None:
        options.json.write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")
    return 0
