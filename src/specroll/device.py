"""Everything that depends on the kind of device: no other file of specroll names `torch.cuda`.

Knows devices, not models or rounds. On the CPU every function here is the plain thing that it looks like.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity


def best() -> torch.device:
    """The CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_gpu(device: torch.device) -> bool:
    """Whether work on the device runs beside the host, which only queues it."""
    return device.type == "cuda"


def wait(device: torch.device) -> None:
    """Return when all work that was queued on the device is done."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on the device."""
    if is_gpu(device):
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def name(device: torch.device) -> str:
    """What tells one device's speed from another's: its name, for a processor with its vector units."""
    if is_gpu(device):
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What figures that were measured on the device hold for."""
    return {
        "device": str(device),
        "processor": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has units for bfloat16 products; emulated ones are several times slower than float32."""
    if is_gpu(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        # mkldnn's own answer below is about AVX-512, and so also yes where it emulates.
        return torch.cpu._is_avx512_bf16_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_fatal(error: Exception) -> bool:
    """Whether nobody should go on after it: memory has run out, or the device is lost."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # a CPU's memory has no type for it


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What PyTorch's profiler has to watch to see the device's work."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu(device) else [])]


def own_microseconds(event: Any, device: torch.device) -> float:
    """The device's own time in an event of the profiler, without its children's."""
    return event.self_device_time_total if is_gpu(device) else event.self_cpu_time_total


def to_host(table: Tensor) -> Callable[[], list[Any]]:
    """Begin to bring a table to the host; what is returned waits for it, and only for it, and gives it as lists."""
    if not is_gpu(table.device):
        return table.tolist
    # Pinned, or the copy would not run beside the host. PyTorch keeps such blocks for the next call.
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    host.copy_(table, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(table.device))

    def read() -> list[Any]:
        arrived.synchronize()
        return host.tolist()

    return read


class CaptureError(RuntimeError):
    """What was to be recorded does something that a graph cannot hold, such as waiting for the device."""


class Recorder(Protocol):
    """Turns a function that always does the same to the same tensors into one that does it again."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """May run it. Raises `CaptureError` where it cannot be recorded."""
        ...

    def forget(self) -> None:
        """Nothing that was recorded so far is replayed any more."""
        ...


class Eager:
    """Records nothing: the function itself runs each time."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def forget(self) -> None:
        """There is nothing to forget."""


class CudaGraphs:
    """Captures what the function launches as a CUDA graph. All graphs share one memory pool for what they compute with.

    So they must run one after another, on one stream, and what is to outlive a replay must have been allocated before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                run()  # libraries set themselves up at their first call, which cannot be captured
            here.wait_stream(aside)
            try:
                # thread_local: another thread, such as one that loads data, may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    run()
            except RuntimeError as error:
                raise CaptureError(str(error).strip() or type(error).__name__) from error
        return graph.replay

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # a pool whose last graph is gone takes no new ones


def recorder(device: torch.device) -> Recorder | None:
    """How passes are recorded on the device; None where running them again is as good."""
    return CudaGraphs(device) if is_gpu(device) else None
