"""A trace: what a proposer offered at every token of some responses, and what of it the target drew.

A response does not depend on what was proposed, so one recording answers for every budget. After each token of a
response, the ranked nodes of a generous tree are kept with the places of those that the target drew; a smaller tree is
a beginning of that list (`tree.grow`), so the accepted length of n nodes is the number of drawn ones among the first n.

Plain numbers and their JSON; how they are recorded is `record`'s matter.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

from specroll.files import write_atomic
from specroll.simulate.surface import MeasuredSurface

FORMAT = 2
_DIGITS = 6  # significant ones of a gain: its rank is kept, and no budget could tell
_AGAIN = "copy it again, or record it anew: specroll simulate record"


class TraceError(ValueError):
    """A trace that cannot be read: missing parts, damaged, or of a format that this version does not know."""


@dataclass(frozen=True, slots=True)
class Round:
    """What may be verified behind one token.

    `gain` holds the ranked nodes' path probabilities, none above the one before; `hits` the places of the nodes that
    the target drew, ascending. They are one path, since an ancestor always stands before its descendants.
    """

    gain: tuple[float, ...]
    hits: tuple[int, ...]

    def accepted(self, nodes: int) -> int:
        """Accepted nodes of a tree of the best `nodes`."""
        return bisect_left(self.hits, nodes)


@dataclass(frozen=True, slots=True)
class Response:
    """`rounds[t - 1]` is the round behind the t-th token: one round fewer than tokens. Equal `prompt`s are shared."""

    prompt: int
    prompt_tokens: int
    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> int:
        return len(self.rounds) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What the engine really did with the first `responses` of a trace: medians over interleaved repeats.

    The keys of the rates are `plain` and `planner`.
    """

    running: int
    responses: int
    repeats: int
    tokens_per_second: Mapping[str, float]
    tokens_per_round: Mapping[str, float]
    prefill_seconds_per_token: float
    plain_over_curve: float
    """Seconds of the plain rounds over what the latency curve says of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A recording, the prices of the machine that it was made on, and what was measured there."""

    nodes: int
    """Most nodes behind a token: no larger tree can be replayed."""
    horizons: int
    draft_vocabulary: int
    """Tokens that can be proposed: what the proposer's last product costs."""
    responses: tuple[Response, ...]
    surface: MeasuredSurface
    measured: tuple[Measurement, ...] = ()
    made: Mapping[str, Any]
    """For people: command, machine, law."""

    def first(self, responses: int) -> list[Response]:
        """So many responses: the trace's own, and from the start again (as other prompts) where it holds fewer."""
        prompts = 1 + max(r.prompt for r in self.responses)
        endless = (replace(r, prompt=r.prompt + lap * prompts) for lap in count() for r in self.responses)
        return list(islice(endless, responses))


def write_trace(path: Path, trace: Trace) -> None:
    """Whole or not at all."""
    record = {
        "specroll_trace": FORMAT,
        "made": dict(trace.made),
        "nodes": trace.nodes,
        "horizons": trace.horizons,
        "draft_vocabulary": trace.draft_vocabulary,
        "surface": trace.surface.as_record(),
        "measured": [asdict(m) for m in trace.measured],
        "responses": [
            {
                "prompt": r.prompt,
                "prompt_tokens": r.prompt_tokens,
                "rounds": [[[float(f"{g:.{_DIGITS}g}") for g in at.gain], at.hits] for at in r.rounds],
            }
            for r in trace.responses
        ],
    }
    write_atomic(path, json.dumps(record, separators=(",", ":"), allow_nan=False).encode())


def read_trace(path: Path) -> Trace:
    """Raises TraceError for a file that is damaged or no trace, OSError for one that cannot be read."""
    record = _read_object(path)
    if record.get("specroll_trace") != FORMAT:
        raise TraceError(
            f"{path} is no trace of format {FORMAT} (its specroll_trace is {record.get('specroll_trace')!r}); {_AGAIN}"
        )
    try:
        trace = Trace(
            nodes=_whole(record["nodes"], 1),
            horizons=_whole(record["horizons"], 1),
            draft_vocabulary=_whole(record["draft_vocabulary"], 1),
            responses=tuple(_response(r, i) for i, r in enumerate(record["responses"], 1)),
            surface=MeasuredSurface.from_record(record["surface"]),
            measured=tuple(Measurement(**m) for m in record["measured"]),
            made=record["made"],
        )
    except KeyError as error:
        raise TraceError(f"{path} is damaged: it has no {error}; {_AGAIN}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is damaged: {error}; {_AGAIN}") from error
    if not trace.responses:
        raise TraceError(f"{path} holds no response; {_AGAIN}")
    longest = max((len(at.gain) for r in trace.responses for at in r.rounds), default=0)
    if longest > trace.nodes:
        raise TraceError(f"{path} is damaged: a round has {longest} nodes where {trace.nodes} are the most; {_AGAIN}")
    return trace


def read_surface(path: Path) -> MeasuredSurface:
    """The surface of another trace, or of a file with a surface alone. Raises like `read_trace`."""
    record = _read_object(path)
    try:
        return MeasuredSurface.from_record(record["surface"])
    except KeyError as error:
        raise TraceError(f"{path} holds no surface: name a file that specroll simulate record wrote") from error
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path} is damaged: {error}; {_AGAIN}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """One JSON object from a file. Raises TraceError for anything else."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise TraceError(f"{path} is not JSON ({error}): was it cut short? {_AGAIN}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{path} is no JSON object; {_AGAIN}")
    return record


def _response(record: Mapping[str, Any], number: int) -> Response:
    try:
        rounds = tuple(_round(gain, hits) for gain, hits in record["rounds"])
        return Response(_whole(record["prompt"], 0), _whole(record["prompt_tokens"], 1), rounds)
    except (ValueError, TypeError) as error:
        raise ValueError(f"response {number}: {error}") from error


def _round(gain: Sequence[float], hits: Sequence[int]) -> Round:
    if any(not 0 <= g <= 1 for g in gain) or any(a < b for a, b in pairwise(gain)):
        raise ValueError(f"gains must be probabilities, none above the one before, got {gain}")
    if any(_whole(hit, 0) >= len(gain) for hit in hits) or any(a >= b for a, b in pairwise(hits)):
        raise ValueError(f"hits must be ascending places among {len(gain)} nodes, got {hits}")
    return Round(tuple(gain), tuple(hits))


def _whole(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected a whole number of at least {least}, got {value!r}")
    return value
