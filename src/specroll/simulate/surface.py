"""What the rounds of a rollout cost on some device, in seconds. Measured ones here, a roofline in `roofline`.

Knows prices, not what is bought: no trace, no budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from specroll.budget import ContextPrice, LatencyCurve


class Surface(Protocol):
    """The prices of one model on one device."""

    @property
    def name(self) -> str: ...

    @property
    def curve(self) -> LatencyCurve:
        """What a planner on that device would have measured: seconds of a pass by packed rows."""
        ...

    def verify(self, running: int, nodes: int, context: int) -> float:
        """A pass over `running` roots and `nodes` nodes, behind `context` tokens of all sequences together."""
        ...

    def propose(self, running: int) -> float:
        """What proposing and growing add to a round."""
        ...

    def prefill(self, tokens: int) -> float:
        """A pass over whole prompts of so many tokens together."""
        ...

    def too_large(self, tokens: int) -> str | None:
        """Why the model and `tokens` tokens in flight do not fit into memory; None where they do."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredSurface:
    """Measured by `specroll simulate record`, and kept in the trace.

    Raises ValueError for prices that are none.
    """

    model: str
    device: str
    measured_curve: LatencyCurve
    propose_seconds: tuple[tuple[int, float], ...]
    """(S, seconds) for few and for many sequences; linear between and beyond."""
    prefill_seconds_per_token: float
    correction: float = 1.0
    """Real plain rounds over what the curve says of them: the host's work, the machine's mood."""

    def __post_init__(self) -> None:
        if len(self.propose_seconds) != 2 or not self._proposing_is_priced():
            raise ValueError(f"proposing needs two ascending prices that never fall, got {self.propose_seconds}")
        if not (0 <= self.prefill_seconds_per_token < float("inf") and 0 < self.correction < float("inf")):
            raise ValueError(
                f"prefill_seconds_per_token must be >= 0 and correction > 0, got {self.prefill_seconds_per_token} and "
                f"{self.correction}"
            )

    def _proposing_is_priced(self) -> bool:
        (few, first), (many, last) = self.propose_seconds
        return 1 <= few < many and 0 <= first <= last < float("inf")

    @property
    def name(self) -> str:
        return f"measured on {self.device}"

    @property
    def curve(self) -> LatencyCurve:
        c, times = self.measured_curve, self.correction
        price = ContextPrice(c.context.per_sequence * times, c.context.per_row * times)
        return LatencyCurve(c.rows, tuple(seconds * times for seconds in c.seconds), price)

    def verify(self, running: int, nodes: int, context: int) -> float:
        return self.correction * self.measured_curve(running + nodes, running, context / running)

    def propose(self, running: int) -> float:
        (few, first), (many, last) = self.propose_seconds
        return max(first + (running - few) * (last - first) / (many - few), 0.0)

    def prefill(self, tokens: int) -> float:
        return tokens * self.prefill_seconds_per_token

    def too_large(self, tokens: int) -> str | None:
        return None  # it ran

    def as_record(self) -> dict[str, Any]:
        """For a JSON file; `from_record` reads it."""
        return {
            "model": self.model,
            "device": self.device,
            "rows": list(self.measured_curve.rows),
            "seconds": list(self.measured_curve.seconds),
            "context": asdict(self.measured_curve.context),
            "propose_seconds": {str(running): seconds for running, seconds in self.propose_seconds},
            "prefill_seconds_per_token": self.prefill_seconds_per_token,
            "correction": self.correction,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MeasuredSurface:
        """Raises ValueError for a record that lacks something or holds something else."""
        try:
            context = ContextPrice(**{name: float(price) for name, price in record["context"].items()})
            rows, seconds = tuple(map(int, record["rows"])), tuple(map(float, record["seconds"]))
            propose = sorted((int(running), float(seconds)) for running, seconds in record["propose_seconds"].items())
            return cls(
                model=str(record["model"]),
                device=str(record["device"]),
                measured_curve=LatencyCurve(rows, seconds, context),
                propose_seconds=tuple(propose),
                prefill_seconds_per_token=float(record["prefill_seconds_per_token"]),
                correction=float(record["correction"]),
            )
        except KeyError as error:
            raise ValueError(f"a surface has no {error}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a surface holds something else than numbers: {error}") from error
