"""`specroll simulate`: what speculation would gain on some device, from a recorded trace and that device's prices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specroll.cli.common import check_at_least, refuse_existing

if TYPE_CHECKING:
    from specroll.simulate import Surface, Trace

MEASURED, ROOFLINE = "measured", "roofline"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Replay recorded acceptance against what rounds cost, and predict tokens per second and the best budget.

    `specroll simulate record` writes the trace. Rounds cost what they cost on the machine that it was recorded on
    (measured), what another trace says of its own machine (a file), or what the published limits of a device and the
    shape of a model make of them (roofline).
    """

    trace: Path
    """Trace file."""
    surface: str = MEASURED
    """What rounds cost: measured, roofline, or a file with a surface, such as another trace."""
    device: tuple[str, ...] = ()
    """Devices of a roofline: h100, h200, b200."""
    size: tuple[str, ...] = ()
    """Models of a roofline: 1.5b, 3b, 7b, 14b, 32b, 70b."""
    other_model: bool = False
    """Take a surface of another model than the trace's, whose acceptance is then an assumption."""
    running: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    """Numbers of slots. Responses are repeated where slots outnumber them."""
    plot: Path | None = None
    """Draw tokens per second over plain decoding's into this .png or .svg file."""
    json: Path | None = None
    """Write the predictions here (keys: docs/commands.md)."""

    def __post_init__(self) -> None:
        from specroll.simulate.roofline import DEVICES, SIZES

        check_at_least(1, **{"each of running": min(self.running, default=0)})
        for name, given, known in (("device", self.device, DEVICES), ("size", self.size, SIZES)):
            if unknown := [word for word in given if word not in known]:
                raise ValueError(f"a {name} is one of {', '.join(known)}; got {unknown[0]}")
            if self.surface == ROOFLINE and not given:
                raise ValueError(f"a roofline needs a --{name}: {', '.join(known)}")
            if self.surface != ROOFLINE and given:
                raise ValueError(f"--{name} belongs to --surface roofline, got --surface {self.surface}")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise ValueError(f"plot must be a .png or .svg file, got {self.plot}")


def main(options: Options) -> int:
    from specroll.cli.simulate_view import as_record, draw, show, show_validations
    from specroll.simulate.predict import predict, validate
    from specroll.simulate.trace import read_trace

    refuse_existing(options.json, "predictions")
    refuse_existing(options.plot, "picture")
    trace = read_trace(options.trace)
    found = {}
    for surface in _surfaces(options, trace):
        found[surface.name] = [predict(trace, surface, running) for running in dict.fromkeys(options.running)]
        show(surface.name, found[surface.name])
    validations = validate(trace) if options.surface == MEASURED else []
    show_validations(validations)
    if options.plot is not None:
        draw(options.plot, found)
        print(f"Drawn into {options.plot}")
    if options.json is not None:
        from specroll.files import write_atomic
        from specroll.report.records import to_json

        record = {"command": "specroll " + " ".join(sys.argv[1:]), **as_record(trace, found, validations)}
        write_atomic(options.json, (to_json(record, indent=1) + "\n").encode())
        print(f"Written to {options.json}")
    return 0


def _surfaces(options: Options, trace: Trace) -> Sequence[Surface]:
    from specroll.simulate.roofline import DEVICES, SIZES, Roofline
    from specroll.simulate.trace import read_surface

    if options.surface == MEASURED:
        return [trace.surface]
    if options.surface == ROOFLINE:
        return [
            Roofline(DEVICES[device], SIZES[size], trace.horizons, trace.draft_vocabulary)
            for device in options.device
            for size in options.size
        ]
    surface = read_surface(Path(options.surface))
    if surface.model != trace.surface.model and not options.other_model:
        raise ValueError(
            f"{options.surface} was measured with another model ({surface.model}) than {options.trace} was recorded "
            f"with ({trace.surface.model}): record a trace with that model, or give --other-model to ask what this "
            "acceptance would be worth there"
        )
    return [surface]
