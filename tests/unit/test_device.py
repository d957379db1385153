"""The seam to the device. What only CUDA can do is run here against a stand-in that writes down what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from specroll import device
from specroll.device import CaptureError, CudaGraphs

CPU = torch.device("cpu")


def test_the_cpu_is_the_plain_thing() -> None:
    device.wait(CPU)
    assert device.free_bytes(CPU) > 0
    assert device.name(CPU).endswith(torch.backends.cpu.get_cpu_capability())
    assert device.recorder(CPU) is None
    assert device.to_host(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))() == [[1.0, 2.0], [3.0, 4.0]]
    assert not device.multiplies_bfloat16(torch.device("meta"))


def test_the_processors_name_is_part_of_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert device.name(CPU).startswith("abacus ")


def test_a_transfer_is_begun_pinned_and_waits_only_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            said.append(("recorded on", stream))

        def synchronize(self) -> None:
            said.append("waited")

    empty = torch.empty

    def pinned(*size, pin_memory: bool, **others):  # type: ignore[no-untyped-def]
        said.append(("pinned", pin_memory))
        return empty(*size, **others)

    monkeypatch.setattr(device, "is_gpu", lambda _: True)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    table = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    read = device.to_host(table)
    assert said == [("pinned", True), ("recorded on", "stream")]
    assert read() == [[1.0, 2.0]] and said[-1] == "waited"


class Cuda:
    """Stands in for the parts of torch.cuda that capture needs; `mode` is what a launch would meet just now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self.pools, self.replays = "launch", [], 0
        self.order: list[str] = []
        stand_in = self

        class Graph:
            def replay(self) -> None:
                stand_in.replays += 1

        class Stream:
            def __init__(self, name: str = "aside") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                stand_in.order.append(f"{self.name} waits for {other.name}")

        here = Stream("here")
        for name, value in {
            "graph_pool_handle": object,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": lambda: here,
            "device": lambda _: nullcontext(),
            "stream": lambda _: self.during("warm-up"),
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def during(self, mode: str) -> Iterator[None]:
        self.mode = mode
        yield
        self.mode = "launch"

    @contextmanager
    def graph(self, graph: object, pool: object, capture_error_mode: str) -> Iterator[None]:
        self.pools.append(pool)
        with self.during("capture"):
            yield

    def run(self) -> None:
        self.order.append(self.mode)


def test_a_capture_is_warmed_up_aside_and_replays_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    replay = CudaGraphs(CPU).record(cuda.run)
    assert cuda.order == ["aside waits for here", "warm-up", "here waits for aside", "capture"]
    replay()
    assert cuda.replays == 1 and len(cuda.order) == 4


def test_all_graphs_share_a_pool_until_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    graphs = CudaGraphs(CPU)
    for _ in range(2):
        graphs.record(cuda.run)
    graphs.forget()
    graphs.record(cuda.run)
    assert cuda.pools[0] is cuda.pools[1] and cuda.pools[2] is not cuda.pools[1]


def test_only_what_fails_in_the_capture_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)

    def fails_in(mode: str) -> None:
        if cuda.mode == mode:
            raise RuntimeError(f"no {mode} today")

    with pytest.raises(CaptureError, match="no capture today"):
        CudaGraphs(CPU).record(lambda: fails_in("capture"))
    with pytest.raises(RuntimeError, match="no warm-up today") as error:
        CudaGraphs(CPU).record(lambda: fails_in("warm-up"))
    assert not isinstance(error.value, CaptureError)
