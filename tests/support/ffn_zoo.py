"""Feed-forward modules that may be run in slices of their tokens, and many that must not although they look alike."""

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
    """A module to try, and whether it is in training mode."""

    name: str
    make: Callable[[], nn.Module]
    training: bool = False


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


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)).eval()


class Product(torch.autograd.Function):
    """A weight made of two, with a backward pass in Python: it knows nothing of tokens."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        ctx.save_for_backward(one, two)
        return one * two

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        one, two = ctx.saved_tensors
        return grad * two, grad * one


class CapacityMoe(Ffn):
    """Experts that take a limited number of tokens each; the later ones are dropped."""

    def __init__(self, factor: float):
        super().__init__()
        self.route, self.experts = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        chosen = F.one_hot((tokens @ self.route).argmax(-1), 4)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        kept = (place < int(len(tokens) / 4 * self.factor)).float()[:, None]
        out = torch.einsum("tc,ecd,te->td", tokens, self.experts, chosen.float()) * kept
        return self.mlp(x) + out.view_as(x)


class _Pair(Ffn):
    def forward(self, x: Tensor) -> Any:
        return self.mlp(x), None


class SoftMoe(nn.Module):
    """Every token to every expert: no choice, nothing to overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Ffn() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], dim=-1) @ weight.unsqueeze(-1)).squeeze(-1)


def _mean(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True)


def _mixed_conv(module: Any, hidden: Tensor) -> Tensor:
    return hidden + F.conv1d(hidden.mT, module.kernel, padding=1, groups=hidden.shape[-1]).mT


def _batch_norm(module: Any, hidden: Tensor) -> Tensor:
    flat = hidden.flatten(0, 1)
    return F.batch_norm(flat, module.running_mean, module.running_var, training=module.training).view_as(hidden)


def _bn() -> nn.Module:
    return With(_batch_norm, wide=True, running_mean=torch.zeros(4 * WIDTH), running_var=torch.ones(4 * WIDTH))


def _attend(module: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def _after(x: Tensor, done: Any) -> Tensor:
    """``x``, once the other argument has been computed."""
    return x


def _exchanged_data(module: Any, x: Tensor) -> Tensor:
    module.count.data = module.count.data + 1
    return x


def _largest_so_far(module: Any, x: Tensor) -> Tensor:
    module.count = torch.maximum(module.count, x.abs().amax())
    return x / module.count


def _int8(x: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=1e-6) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def _own_buffer(module: Any, x: Tensor) -> Tensor:
    module.scratch[:, : x.shape[1]] = x
    return module.scratch[:, : x.shape[1]].clone()


def _swallowed(module: Any, x: Tensor) -> Tensor:
    try:
        return x + _mean(x)
    except Exception:
        return x


_calls = [0]


def _every_other_call(module: Any, x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * (1.0 + _calls[0] % 2)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _cases(changes: dict[str, Any], **options: Any) -> list[Case]:
    """Modules of these changes; a change is a function, or one with the attributes that it needs."""

    def make(change: Any) -> nn.Module:
        function, state = change if isinstance(change, tuple) else (change, {})
        return With(function, **options, **{name: value() for name, value in state.items()})

    return [Case(name, partial(make, change)) for name, change in changes.items()]


_GATE = {"gate": lambda: nn.Parameter(torch.zeros(1))}
_COUNT = {"count": lambda: torch.zeros(1)}

_GOOD_BETWEEN: dict[str, Any] = {
    "softmax over channels": lambda m, h: h.softmax(-1),
    "convolution of width 1": (
        lambda m, h: F.conv1d(h.mT, m.kernel).mT,
        {"kernel": lambda: nn.Parameter(torch.randn(64, 64, 1) * 0.1)},
    ),
    "flattened tokens": lambda m, h: (h.flatten(0, 1) * 2).view_as(h),
    "heads": lambda m, h: h.unflatten(-1, (4, 16)).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
}
_GOOD_BEFORE: dict[str, Any] = {
    "scale per token": lambda m, x: _int8(x, x.abs().amax(-1, keepdim=True)),
    "another sample of the batch": lambda m, x: x + x.mean(0, keepdim=True),
    "multiplied from the left": (lambda m, x: (m.left @ x.mT).mT, {"left": lambda: _weight(16, 16)}),
    "clones and literals": lambda m, x: x.clone().mul_(torch.tensor(0.5)) + torch.tensor([1.0] * 16),
}
_BAD_BETWEEN: dict[str, Any] = {
    "convolution": (_mixed_conv, {"kernel": lambda: _weight(64, 1, 3)}),
    "convolution that starts at zero": (_mixed_conv, {"kernel": lambda: nn.Parameter(torch.zeros(64, 1, 3))}),
    "tiny convolution": (_mixed_conv, {"kernel": lambda: nn.Parameter(torch.randn(64, 1, 3) * 1e-6)}),
    "softmax over tokens": lambda m, h: h.softmax(1),
}
_BAD_BEFORE: dict[str, Any] = {
    "zero-initialised context": (lambda m, x: x + m.gate * _mean(x), _GATE),
    "context hidden from NaN": lambda m, x: x + 1e-9 * _mean(torch.nan_to_num(x)),
    "share of positive tokens": lambda m, x: x + _mean((x > 0).float()),
    "token shift": lambda m, x: 0.5 * x + 0.5 * F.pad(x, (0, 0, 1, -1)),
    "rolled tokens": lambda m, x: x + x.roll(1, 1),
    "first token added to all": lambda m, x: x + x[:, :1],
    "last token added to all": lambda m, x: x + x[:, -1, None],
    "attention": _attend,
    "attention by hand": lambda m, x: (x @ x.mT).softmax(-1) @ x,
    "cumulative sum": lambda m, x: x.cumsum(1),
    "sorted tokens": lambda m, x: x.sort(1).values,
    "pooling": lambda m, x: x + F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "group norm over tokens": lambda m, x: F.group_norm(x.mT, 4).mT,
    "instance norm over tokens": lambda m, x: F.instance_norm(x.mT).mT,
    "layer norm over tokens": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "long inputs take another path": lambda m, x: x + _mean(x) if x.shape[1] > 48 else x,
    "long inputs are scaled": lambda m, x: x * 2 if x.shape[1] > 48 else x,
    "scaled by the length": lambda m, x: x / x.shape[1],
    "scaled by a tensor of the length": lambda m, x: x / torch.tensor(float(x.shape[1])),
    "scaled by counted tokens": lambda m, x: x / torch.ones(x.shape[1]).sum(),
    "choice by a threshold of the length": (
        lambda m, x: x * ((x @ m.route) * x.shape[1] > 64.0),
        {"route": lambda: _weight(16, 1)},
    ),
    "best tokens only": lambda m, x: x.topk(4, dim=1).values.sum(1, keepdim=True) + x,
    "tokens chosen by value": lambda m, x: x[x[..., 0] > 0],
    "writes to its input": lambda m, x: x.mul_(1.5),
    "writes to its input through a view": lambda m, x: x.view(-1, 16).add_(1).view_as(x),
    "writes to its input's data": lambda m, x: x.data.mul_(2),
    "counts in a buffer": (lambda m, x: _after(x, m.count.add_(1)), _COUNT),
    "counts by exchanged memory": (_exchanged_data, _COUNT),
    "counts by a new buffer": (lambda m, x: _after(x, setattr(m, "count", m.count + 1)), _COUNT),
    "counts in Python": (lambda m, x: _after(x, setattr(m, "calls", m.calls + 1)), {"calls": int}),
    "counts in a list": (lambda m, x: _after(x, m.seen.append(x.shape[1])), {"seen": list}),
    "largest value so far": (_largest_so_far, {"count": lambda: torch.ones(())}),
    "writes to a scratch buffer": (_own_buffer, {"scratch": lambda: torch.zeros(2, 256, 16)}),
    "scale per tensor": lambda m, x: _int8(x, x.abs().max()),
    "a weight per position": (lambda m, x: x + m.where[:, : x.shape[1]], {"where": lambda: _weight(1, 256, 16)}),
    "a product over positions": (lambda m, x: (x.mT @ m.where).mT, {"where": lambda: _weight(64, 64)}),
    "path by the input's values": lambda m, x: x - _mean(x) if x.abs().max() > 100 else x,
    "path by a parameter": (lambda m, x: x if m.gate.item() == 0 else x + _mean(x), _GATE),
    "path by a parameter's list": (lambda m, x: x if m.gate.tolist() == [0.0] else x + _mean(x), _GATE),
    "a mixture that catches errors": _swallowed,
    "other numbers every other call": _every_other_call,
    "drops layers at random": lambda m, x: x if random.random() < 0.5 else x * 2,
    "drops layers by NumPy": lambda m, x: x if np.random.rand() < 0.5 else x * 2,
    "dropout always": lambda m, x: F.dropout(x, 0.5, training=True),
    "noise": lambda m, x: x + torch.randn(16),
    "pairs of tokens": lambda m, x: x.view(2, -1, 32).flip(-1).view_as(x),
    "every second token": lambda m, x: x[:, ::2],
    "one token for all": lambda m, x: x.mean(1),
    "tokens first": lambda m, x: x.transpose(0, 1),
    "reversed tokens": lambda m, x: x.flip(1),
    "tokens against tokens": lambda m, x: x + (x[:, :, None] * x[:, None]).amax(2),
    "spectrum": lambda m, x: _mean(torch.fft.rfft(x, dim=1).abs()) + x,
}

GOOD = [
    Case("two linear layers", Ffn),
    Case("Wan's Sequential", lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU("tanh"), nn.Linear(64, 16))),
    Case("GEGLU", lambda: nn.Sequential(Geglu(), nn.Dropout(0.0), nn.Linear(64, 16))),
    Case("SwiGLU", SwiGlu),
    Case("in-place inside", lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))),
    Case("LayerNorm", lambda: nn.Sequential(nn.LayerNorm(16), Ffn())),
    Case("RMSNorm", lambda: nn.Sequential(nn.RMSNorm(16), Ffn())),
    Case("dropout switched off", lambda: nn.Sequential(Ffn(), nn.Dropout(0.5))),
    Case("batch norm with fixed statistics", _bn),
    Case("experts for every token", SoftMoe),
    *_cases(_GOOD_BETWEEN, wide=True),
    *_cases(_GOOD_BEFORE),
]

BAD = [
    Case("experts with capacity", lambda: CapacityMoe(1.0)),
    Case("experts with capacity that never overflows", lambda: CapacityMoe(4.0)),
    Case("functional batch norm, training", _bn, training=True),
    Case("in-place activation first", lambda: nn.Sequential(nn.ReLU(inplace=True), Ffn())),
    Case("dropout in training", lambda: nn.Sequential(Ffn(), nn.Dropout(0.5)), training=True),
    Case("two outputs", _Pair),
    Case("nothing at all", nn.Identity),
    *_cases(_BAD_BETWEEN, wide=True),
    *_cases(_BAD_BEFORE),
]
