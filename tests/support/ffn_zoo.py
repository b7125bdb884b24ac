"""Feed-forward modules that may be run in slices of their tokens, and some that must not although they look alike."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Case(NamedTuple):
    """A module to try, and the state that the report gives it once it has been called with 64 tokens."""

    name: str
    make: Callable[[], nn.Module]
    state: str = "on"


class Ffn(nn.Module):
    """Two linear layers; the others change what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class With(Ffn):
    """``change(self, x)`` before (or, with ``wide``, between) the linear layers."""

    def __init__(self, change: Callable[[Any, Tensor], Any], wide: bool = False, **state: Any):
        super().__init__()
        self.change, self.wide = change, wide
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        if self.wide:
            return self.fc2(self.change(self, F.gelu(self.fc1(x))))
        return self.mlp(self.change(self, x))


class Geglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.proj(x).chunk(2, dim=-1)
        return hidden * F.gelu(gate)


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)).eval()


def _counted(m: Any, x: Tensor) -> float:
    """How often the module was called, kept in several places."""
    m.count.add_(1)
    m.seen.append(x.shape[1])
    _counted.calls = getattr(_counted, "calls", 0) + 1  # type: ignore[attr-defined]
    m.calls += 1
    return 1.0 + m.calls


def _kept(m: Any, h: Tensor) -> Tensor:
    """As TeaCache does: the next call takes a part of this one's result."""
    last, m.last = m.last, h
    return h if last is None else h + last


def _after(x: Tensor, done: Any) -> Tensor:
    """``x``, once the other argument has been computed."""
    return x


def _without_gradients(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().amax(-1, keepdim=True)
    return h / (1 + scale)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def _hooked(m: Any, h: Tensor) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda grad: grad / grad.norm())
    return h * 2


def _weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


_COUNTS = {"count": lambda: torch.zeros(1), "seen": list, "calls": int}
# Between the layers: a function of the module and the hidden tensor, or one with the attributes that it needs.
_ON: dict[str, Any] = {
    "convolution of width 1": (lambda m, h: F.conv1d(h.mT, m.kernel).mT, {"kernel": _weight(64, 64, 1)}),
    "flattened tokens": lambda m, h: (h.flatten(0, 1) * 2).view_as(h),
    "clones and literals": lambda m, h: h.clone().mul_(torch.tensor(0.5)) + torch.tensor([1.0] * 64),
    "writes to a view of its own": lambda m, h: _after(own := h * 1, own.view(*h.shape[:2], -1, 8)[..., 0].mul_(2)),
    # The code runs once and sees all tokens: what it makes of their number, or counts, is right in slices.
    "a weight per position": (lambda m, h: h + m.where[:, : h.shape[1]], {"where": _weight(1, 256, 64)}),
    "counts": (lambda m, h: h * _counted(m, h), _COUNTS),
    "random numbers of its own": lambda m, h: h * random.random() * np.random.rand() + torch.randn(64),
}  # fmt: skip
_REFUSED: dict[str, Any] = {
    "convolution": (lambda m, h: h + F.conv1d(h.mT, m.kernel, padding=32, dilation=32, groups=64).mT,
                    {"kernel": _weight(64, 1, 3)}),
    "softmax over tokens": lambda m, h: h.softmax(1),
    "zero-initialised context": (lambda m, h: h + m.gate * h.mean(1, keepdim=True), {"gate": lambda: torch.zeros(1)}),
    "path by values": lambda m, h: h * 2 if h.abs().max() > 1 else h,
    "keeps its tokens": (_kept, {"last": lambda: None}),
    "asks for memory": lambda m, h: h * (h.untyped_storage().nbytes() + bool(h.data_ptr())),
    "dropout": lambda m, h: F.dropout(h, 0.5, training=True),
    "one token for all": lambda m, h: h.mean(1),
    "largest value so far": (lambda m, h: h / _after(m.most, m.most.copy_(torch.maximum(m.most, h.detach().amax()))),
                             {"most": lambda: torch.ones(())}),
    "a weight that changes": (lambda m, h: _after(h + m.most, m.most.add_(1)), {"most": lambda: torch.ones(())}),
}  # fmt: skip
# Right in slices where no gradient is wanted.
_BACKWARD: dict[str, Any] = {
    "a backward pass of its own": lambda m, h: _Clipped.apply(h), "a part without gradients": _without_gradients,
    "a hook on a gradient": _hooked,
}  # fmt: skip


def _with(change: Any) -> nn.Module:
    function, state = change if isinstance(change, tuple) else (change, {})
    return With(function, wide=True, **{name: value() for name, value in state.items()})


CASES = [
    Case("two linear layers", Ffn),
    Case("Wan's Sequential", lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU("tanh"), nn.Linear(64, 16))),
    Case("GEGLU", lambda: nn.Sequential(Geglu(), nn.Dropout(0.0), nn.Linear(64, 16))),
    Case("in-place inside", lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))),
    Case("norms", lambda: nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16), Ffn(), nn.Dropout(0.5))),
    Case("in-place activation first", lambda: nn.Sequential(nn.ReLU(inplace=True), Ffn()), "refused"),
    Case("nothing at all", nn.Identity, "refused"),
    *(Case(name, partial(_with, change)) for name, change in _ON.items()),
    *(Case(name, partial(_with, change), "refused") for name, change in _REFUSED.items()),
    *(Case(name, partial(_with, change), "backward") for name, change in _BACKWARD.items()),
]
