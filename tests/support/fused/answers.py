"""The common part of the stand-ins for two makers' drivers: a library with the driver's functions, built with g++, each
of which hands its arguments to one callback; faults that are injected; what was asked, queued, and wrong."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.machine.device import DeviceInfo

from .emulation import HERE, built_once

Fault = int | Callable[[], int]
# HIP numbers its errors as the CUDA driver does.
WORDS = {
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    9: "invalid configuration argument",
    101: "invalid device ordinal",
    200: "device kernel image is invalid",
    201: "invalid device context",
    209: "no kernel image is available for execution on the device",
    400: "invalid resource handle",
    500: "named symbol not found",
    700: "an illegal memory access was encountered",
    701: "too many resources requested for launch",
    719: "unspecified launch failure",
}
_WORDS = {code: ctypes.create_string_buffer(words.encode()) for code, words in WORDS.items()}
ANSWER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_ulonglong))


@functools.cache
def library(name: str) -> str:
    """A file of ``emulator``, built."""
    key = hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:24]
    return str(built_once(f"{name.partition('.')[0]}-{key}.so", ["-shared", "-O1", HERE / name], name))


class Answers:
    """Cards that are not here, each a ``card``; ``execute`` is given every launch, with a copy of its parameters.

    Attributes:
        variants: whose machine code an image is, to be told before it is loaded.
        faults: function -> the code that it returns instead of doing anything, or what gives that code (0: none).
        queued: the launches so far; asked: how often each function was called.
        problems: what would have been wrong on a real card.
    """

    # A built library has one callback.
    one_at_a_time = threading.RLock()
    arguments: Mapping[str, int]  # of each function: how many
    error_words: str  # the function that gives the words of an error
    init: str  # the one that must be called first
    _lib: ctypes.CDLL

    def __init__(
        self,
        card: DeviceInfo,
        execute: Callable[[Launch], object] = lambda launch: None,
        *,
        devices: int = 1,
        current_stream: int = 0,
    ):
        self.card, self.execute, self.devices, self.current_stream = card, execute, devices, current_stream
        self.streams = {0, 1, 2, current_stream}  # none, and the headers' names of the two default streams
        self.variants: dict[bytes, Compilation] = {}
        self.faults: dict[str, Fault] = {}
        self.queued: list[Launch] = []
        self.asked: Counter[str] = Counter()
        self.problems: list[str] = []
        self._is_ready = False
        self._given: dict[int, object] = {}  # handle -> what it stands for
        self._thread = threading.local()
        self._raised: BaseException | None = None
        self._callback = ANSWER(self._answer)

    def stream(self, index: int) -> int:
        return self.current_stream

    def _answer(self, name: bytes, given: ctypes._Pointer[ctypes.c_ulonglong]) -> int:
        function = name.decode()
        arguments = [given[i] for i in range(self.arguments[function])]
        try:
            if function == self.error_words:
                return self._error_string(*arguments)
            self.asked[function] += 1
            fault = self.faults.get(function, 0)
            code = fault() if callable(fault) else fault
            if code:
                return code
            if not self._is_ready and function != self.init:
                return self._wrong(3, f"{function} before {self.init}")
            return getattr(self, f"_{function}")(*arguments)
        except BaseException as error:  # ctypes would print it and go on
            self._raised = error
            return 999

    def call(self, function: str, *arguments: object) -> None:
        with self.one_at_a_time:
            self._lib.answer_with(self._callback)
            try:
                super().call(function, *arguments)  # type: ignore[misc]
            finally:
                raised, self._raised = self._raised, None
                if raised is not None:
                    raise raised  # what an answer has raised: a callback cannot

    def left_behind(self) -> list[str]:
        """The changes that this thread should have undone."""
        return ["another capture mode"] * (getattr(self._thread, "mode", 0) != 0)

    def image_at(self, address: int) -> bytes:
        """The image that lies there, of those that it was told of; empty: another one. The header, which says where the
        last table is, is compared first: no more is read than there is."""
        head = ctypes.string_at(address, 64)
        known = (image for image in self.variants if image[:64] == head)
        return next((image for image in known if ctypes.string_at(address, len(image)) == image), b"")

    def _begin(self, flags: int) -> int:
        self._is_ready = True
        return self._wrong(1, f"{self.init}({flags})") if flags else 0

    def _error_string(self, code: int, words: int) -> int:
        found = _WORDS.get(code)
        ctypes.c_void_p.from_address(words).value = None if found is None else ctypes.addressof(found)
        return 1 if found is None else 0

    def _exchange_mode(self, mode: int) -> int:
        new, before = ctypes.c_int.from_address(mode), getattr(self._thread, "mode", 0)
        if new.value not in (0, 1, 2):
            return self._wrong(1, f"capture mode {new.value}")
        self._thread.mode, new.value = new.value, before
        return 0

    def _queue(self, launch: Launch) -> int:
        self.queued.append(launch)
        self.execute(launch)
        return 0

    def _wrong(self, code: int, sentence: str) -> int:
        self.problems.append(sentence)
        return code

    def _handle(self, of: object) -> int:
        handle = 0x1000 + 16 * len(self._given)
        self._given[handle] = of
        return handle


def fails_once(code: int) -> Callable[[], int]:
    """A fault that only the next call meets."""
    codes = iter([code])
    return lambda: next(codes, 0)
