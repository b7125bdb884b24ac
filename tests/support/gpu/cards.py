"""A torch that believes it has cards of NVIDIA's or AMD's, for a process of :func:`.guard.call`: tensors say that they
are on ``cuda:1``, and launches are executed in the emulation behind the strict stand-in for the driver. There are no
``torch.compile``, CUDA graphs and pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from attn_support.fused.device import AnyStandIn, execute, noting
from attn_support.fused.driver import Compiler, StandIn
from attn_support.fused.hip import HipCompiler, HipStandIn

from pascal_attn_core.fused import gpu
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.gpu.hip import HipRuntime
from pascal_attn_core.fused.gpu.runtime import Driver
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine import amd_system
from pascal_attn_core.machine.device import device_info

from . import guard, tensors


class Card(NamedTuple):
    """This class describes one kind of card."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    arch: str = ""  # of AMD's
    total_bytes: int = 11 << 30
    free_bytes: int = 9 << 30
    true_arch: str = ""  # where HSA_OVERRIDE_GFX_VERSION says otherwise


CARDS = {
    card.name: card
    for card in (
        Card("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28),
        Card("Tesla P100-PCIE-16GB", (6, 0), 56, total_bytes=16 << 30),
        Card("Tesla V100-SXM2-16GB", (7, 0), 80, total_bytes=16 << 30),
        Card("Tesla T4", (7, 5), 40),
        Card("NVIDIA GeForce RTX 2080", (7, 5), 46, total_bytes=8 << 30, free_bytes=6 << 30),
        Card("AMD Instinct MI50", (9, 0), 60, "gfx906"),
        Card("AMD Radeon RX 5700 XT", (10, 3), 20, "gfx1030", true_arch="gfx1010"),
        Card("AMD Radeon RX 6800", (10, 3), 30, "gfx1030"),
    )
}


class _Thread(threading.local):
    """State that torch's C++ keeps for each thread: its device, and the stream of each."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_thread = _Thread()
is_capturing = False  # whether a graph is being captured on the current stream
_handles = {0}  # of all streams that there are


def index_of(device: Any = None) -> int:
    """The number of a card by whatever torch lets it be named."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _thread.device if index is None else index


class Stream:
    """A stand-in for ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, is_default: bool = False):
        self.device = torch.device("cuda", index_of(device))
        self.device_index = self.device.index
        self.cuda_stream = 0 if is_default else 0x7F0000000000 + 16 * len(_handles)
        _handles.add(self.cuda_stream)

    def wait_stream(self, other: Any = None) -> None: ...

    wait_event = synchronize = wait_stream

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A stand-in for ``torch.cuda.Event``, with which a time between events of different cards is an error."""

    recorded: ClassVar[list[Stream]] = []  # the streams of all events so far

    def __init__(self, enable_timing: bool = False, **options: Any):
        self.is_timed, self.seconds, self.device = enable_timing, 0.0, None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        Event.recorded.append(stream)
        self.seconds, self.device = time.perf_counter(), stream.device

    wait, synchronize, query = Stream.wait_stream, Stream.wait_stream, Stream.query

    def elapsed_time(self, end: Event) -> float:
        assert self.is_timed
        assert end.is_timed
        assert self.device == end.device is not None
        return max(1e-3, (end.seconds - self.seconds) * 1e3)


@functools.cache
def default_stream_of(index: int) -> Stream:
    return Stream(index, is_default=True)


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return _thread.streams.get(index) or default_stream_of(index)


@contextlib.contextmanager
def _on(index: int, stream: Stream | None = None) -> Iterator[None]:
    device, before = _thread.device, current_stream(index)
    _thread.device, _thread.streams[index] = index, stream or before
    try:
        yield
    finally:
        _thread.device, _thread.streams[index] = device, before


def _properties(card: Card, index: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.num_sms,
        total_memory=card.total_bytes,
        L2_cache_size=4 << 20,
        gcnArchName=card.arch,
        warp_size=64 if card.arch.startswith("gfx9") else 32,
        shared_memory_per_block=(64 if card.arch else 48) << 10,
        clock_rate=1_500_000,
        uuid=f"0000-{index}",
        pci_domain_id=0,
        pci_bus_id=3 + index,
        pci_device_id=0,
    )


def believe(
    card: Card, count: int = 1, *, run: Callable[[Launch], object] = execute, compiler: Any = None
) -> AnyStandIn:
    """Make torch, and the package, believe in so many cards of a kind, which ``run`` launches; this cannot be undone.

    Returns:
        Their driver, whose ``problems`` say what would have been wrong on a real card."""
    ctypes.CDLL(str(guard.library())).fake_cards_are(count)
    for name, value in _answers(card, count).items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, value)
    torch.version.hip, torch.version.cuda = ("6.3.42133", None) if card.arch else (None, "12.6")
    if card.true_arch:
        os.environ[amd_system.OVERRIDE] = "10.3.0"
        node = amd_system.Node(card.true_arch, (0, 3, 0))
        amd_system.nodes = lambda folder=None: [node]
    tensors.serve(index_of)
    return _drive(count, run, compiler or Compiler())


def _answers(card: Card, count: int) -> dict[str, Any]:
    """Functions that replace those of ``torch.cuda``."""
    state = torch.default_generator
    answers: dict[str, Any] = {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: is_capturing,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "device_count": lambda: count,
        "current_device": index_of,
        "set_device": lambda device: setattr(_thread, "device", index_of(device)),
        "device": lambda device: _on(index_of(device)),
        "can_device_access_peer": lambda one, other: False,
        "get_arch_list": lambda: [card.arch] if card.arch else ["sm_50", "sm_60", "sm_61", "sm_70", "sm_75"],
        "get_device_properties": lambda device=None: _properties(card, index_of(device)),
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "mem_get_info": lambda device=None: (card.free_bytes, card.total_bytes),
        "memory_stats": lambda device=None: {},
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default_stream_of(index_of(device)),
        "stream": lambda new: contextlib.nullcontext() if new is None else _on(new.device_index, new),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed_all": state.manual_seed,
        "get_rng_state": lambda device=None: state.get_state(),
        "set_rng_state": lambda new, device=None: None,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    return {**answers, **dict.fromkeys(sizes, lambda device=None: 1 << 20)}


def _drive(count: int, run: Callable[[Launch], object], compiler: Any) -> AnyStandIn:
    """Put the stand-in for a driver behind the package."""
    info = device_info("cuda:0")
    driver: AnyStandIn
    if info.kind == "hip":
        driver, hiprtc = HipStandIn(info, run, devices=count), HipCompiler()
        gpu._RUNTIMES["hip"] = HipRuntime(lambda: driver, lambda: hiprtc)
    else:
        driver = StandIn(info, run, devices=count)
        gpu._RUNTIMES["cuda"] = CudaRuntime(lambda: driver, lambda arch: compiler)
    driver.streams = _handles
    driver.stream = functools.partial(Driver.stream, driver)  # type: ignore[method-assign]
    Kernels.machine_code = noting(driver, Kernels.machine_code)  # type: ignore[method-assign]
    return driver
