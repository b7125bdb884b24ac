"""Feed-forward modules that may be run in slices of their tokens, and many that must not although they look alike."""

from __future__ import annotations

import random
from collections.abc import Callable
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


class CapacityByValue(Ffn):
    """The same without any operator that counts along the tokens: the best tokens by a threshold of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * ((x @ self.route) * x.shape[1] > 64.0)


class SoftMoe(nn.Module):
    """Every token to every expert: no choice, nothing to overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Ffn() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], dim=-1) @ weight.unsqueeze(-1)).squeeze(-1)


def _mixed_conv(module: Any, hidden: Tensor) -> Tensor:
    return hidden + F.conv1d(hidden.mT, module.kernel, padding=1, groups=hidden.shape[-1]).mT


def _batch_norm(module: Any, hidden: Tensor) -> Tensor:
    flat = hidden.flatten(0, 1)
    return F.batch_norm(flat, module.running_mean, module.running_var, training=module.training).view_as(hidden)


def _bn() -> nn.Module:
    return With(_batch_norm, wide=True, running_mean=torch.zeros(4 * WIDTH), running_var=torch.ones(4 * WIDTH))


def _attend(module: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def _long_context(module: Any, x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True) if x.shape[1] > 48 else x


def _count_in_python(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return x


def _count_in_list(module: Any, x: Tensor) -> Tensor:
    module.seen.append(x.shape[1])
    return x


def _count_in_buffer(module: Any, x: Tensor) -> Tensor:
    module.count += 1
    return x


def _exchanged_data(module: Any, x: Tensor) -> Tensor:
    module.count.data = module.count.data + 1
    return x


def _new_buffer(module: Any, x: Tensor) -> Tensor:
    module.count = module.count + 1
    return x


def _largest_so_far(module: Any, x: Tensor) -> Tensor:
    module.count = torch.maximum(module.count, x.abs().amax())
    return x / module.count


def _per_tensor_int8(module: Any, x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round().clamp(-127, 127) * scale


def _per_token_int8(module: Any, x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def _own_buffer(module: Any, x: Tensor) -> Tensor:
    module.scratch[:, : x.shape[1]] = x
    return module.scratch[:, : x.shape[1]].clone()


def _if_trained(module: Any, x: Tensor) -> Tensor:
    return x if module.gate.item() == 0 else x + x.mean(1, keepdim=True)


def _if_trained_by_list(module: Any, x: Tensor) -> Tensor:
    return x if module.gate.tolist() == [0.0] else x + x.mean(1, keepdim=True)


def _if_large(module: Any, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True) if x.abs().max() > 100 else x


def _swallowed(module: Any, x: Tensor) -> Tensor:
    try:
        return x + x.mean(1, keepdim=True)
    except Exception:
        return x


_calls = [0]


def _every_other_call(module: Any, x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * (1.0 + _calls[0] % 2)


def _zero_gate() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


GOOD = [
    Case("two linear layers", Ffn),
    Case("Wan's Sequential", lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU("tanh"), nn.Linear(64, 16))),
    Case("GEGLU", lambda: nn.Sequential(Geglu(), nn.Dropout(0.0), nn.Linear(64, 16))),
    Case("SwiGLU", SwiGlu),
    Case(
        "in-place activation inside", lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))
    ),
    Case("LayerNorm", lambda: nn.Sequential(nn.LayerNorm(16), Ffn())),
    Case("RMSNorm", lambda: nn.Sequential(nn.RMSNorm(16), Ffn())),
    Case("dropout switched off", lambda: nn.Sequential(Ffn(), nn.Dropout(0.5))),
    Case("batch norm with fixed statistics", _bn),
    Case("softmax over channels", lambda: With(lambda m, h: h.softmax(-1), wide=True)),
    Case("experts for every token", SoftMoe),
    Case("scale per token", lambda: With(_per_token_int8)),
    Case(
        "convolution of width 1",
        lambda: With(
            lambda m, h: F.conv1d(h.mT, m.kernel).mT, wide=True, kernel=nn.Parameter(torch.randn(64, 64, 1) * 0.1)
        ),
    ),
    Case("another sample of the batch", lambda: With(lambda m, x: x + x.mean(0, keepdim=True))),
    Case("flattened tokens", lambda: With(lambda m, h: (h.flatten(0, 1) * 2).view_as(h), wide=True)),
    Case(
        "multiplied from the left",
        lambda: With(lambda m, x: (m.left @ x.mT).mT, left=nn.Parameter(torch.randn(16, 16))),
    ),
    Case(
        "heads",
        lambda: With(
            lambda m, h: h.unflatten(-1, (4, 16)).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2), wide=True
        ),
    ),
    Case(
        "clones and literals", lambda: With(lambda m, x: x.clone().mul_(torch.tensor(0.5)) + torch.tensor([1.0] * 16))
    ),
]

BAD = [
    Case("convolution", lambda: With(_mixed_conv, wide=True, kernel=nn.Parameter(torch.randn(64, 1, 3)))),
    Case(
        "convolution that starts at zero",
        lambda: With(_mixed_conv, wide=True, kernel=nn.Parameter(torch.zeros(64, 1, 3))),
    ),
    Case(
        "tiny convolution",
        lambda: With(_mixed_conv, wide=True, kernel=nn.Parameter(torch.randn(64, 1, 3) * 1e-6)),
    ),
    Case(
        "zero-initialised context",
        lambda: With(lambda m, x: x + m.gate * x.mean(1, keepdim=True), gate=_zero_gate()),
    ),
    Case(
        "context hidden from NaN",
        lambda: With(lambda m, x: x + 1e-9 * torch.nan_to_num(x).mean(1, keepdim=True)),
    ),
    Case("share of positive tokens", lambda: With(lambda m, x: x + (x > 0).float().mean(1, keepdim=True))),
    Case("token shift", lambda: With(lambda m, x: 0.5 * x + 0.5 * F.pad(x, (0, 0, 1, -1)))),
    Case("rolled tokens", lambda: With(lambda m, x: x + x.roll(1, 1))),
    Case("first token added to all", lambda: With(lambda m, x: x + x[:, :1])),
    Case("last token added to all", lambda: With(lambda m, x: x + x[:, -1, None])),
    Case("attention", lambda: With(_attend)),
    Case("attention by hand", lambda: With(lambda m, x: (x @ x.mT).softmax(-1) @ x)),
    Case("softmax over tokens", lambda: With(lambda m, h: h.softmax(1), wide=True)),
    Case("cumulative sum", lambda: With(lambda m, x: x.cumsum(1))),
    Case("sorted tokens", lambda: With(lambda m, x: x.sort(1).values)),
    Case("pooling", lambda: With(lambda m, x: x + F.avg_pool1d(x.mT, 3, 1, 1).mT)),
    Case("group norm over tokens", lambda: With(lambda m, x: F.group_norm(x.mT, 4).mT)),
    Case("instance norm over tokens", lambda: With(lambda m, x: F.instance_norm(x.mT).mT)),
    Case("layer norm over tokens", lambda: With(lambda m, x: F.layer_norm(x, x.shape[1:]))),
    Case("functional batch norm, training", _bn, training=True),
    Case("long inputs take another path", lambda: With(_long_context)),
    Case("long inputs are scaled", lambda: With(lambda m, x: x * 2 if x.shape[1] > 48 else x)),
    Case("scaled by the length", lambda: With(lambda m, x: x / x.shape[1])),
    Case(
        "scaled by a tensor of the length",
        lambda: With(lambda m, x: x / torch.tensor(float(x.shape[1]))),
    ),
    Case("scaled by counted tokens", lambda: With(lambda m, x: x / torch.ones(x.shape[1]).sum())),
    Case("experts with capacity", lambda: CapacityMoe(1.0)),
    Case("experts with capacity that never overflows", lambda: CapacityMoe(4.0)),
    Case("choice by a threshold of the length", CapacityByValue),
    Case(
        "best tokens only",
        lambda: With(lambda m, x: x.topk(4, dim=1).values.sum(1, keepdim=True) + x),
    ),
    Case("tokens chosen by value", lambda: With(lambda m, x: x[x[..., 0] > 0])),
    Case("writes to its input", lambda: With(lambda m, x: x.mul_(1.5))),
    Case(
        "writes to its input through a view",
        lambda: With(lambda m, x: x.view(-1, 16).add_(1).view_as(x)),
    ),
    Case("in-place activation first", lambda: nn.Sequential(nn.ReLU(inplace=True), Ffn())),
    Case("writes to its input's data", lambda: With(lambda m, x: x.data.mul_(2))),
    Case("counts in a buffer", lambda: With(_count_in_buffer, count=torch.zeros(1))),
    Case("counts by exchanged memory", lambda: With(_exchanged_data, count=torch.zeros(1))),
    Case("counts by a new buffer", lambda: With(_new_buffer, count=torch.zeros(1))),
    Case("counts in Python", lambda: With(_count_in_python, calls=0)),
    Case("counts in a list", lambda: With(_count_in_list, seen=[])),
    Case("largest value so far", lambda: With(_largest_so_far, count=torch.ones(()))),
    Case("writes to a scratch buffer", lambda: With(_own_buffer, scratch=torch.zeros(2, 256, 16))),
    Case("scale per tensor", lambda: With(_per_tensor_int8)),
    Case(
        "a weight per position",
        lambda: With(lambda m, x: x + m.where[:, : x.shape[1]], where=nn.Parameter(torch.randn(1, 256, 16))),
    ),
    Case(
        "a product over positions",
        lambda: With(lambda m, x: (x.mT @ m.where).mT, where=nn.Parameter(torch.randn(64, 64))),
    ),
    Case("path by the input's values", lambda: With(_if_large)),
    Case("path by a parameter", lambda: With(_if_trained, gate=_zero_gate())),
    Case("path by a parameter's list", lambda: With(_if_trained_by_list, gate=_zero_gate())),
    Case("a mixture that catches errors", lambda: With(_swallowed)),
    Case("other numbers every other call", lambda: With(_every_other_call)),
    Case("drops layers at random", lambda: With(lambda m, x: x if random.random() < 0.5 else x * 2)),
    Case("drops layers by NumPy", lambda: With(lambda m, x: x if np.random.rand() < 0.5 else x * 2)),
    Case("dropout in training", lambda: nn.Sequential(Ffn(), nn.Dropout(0.5)), training=True),
    Case("dropout always", lambda: With(lambda m, x: F.dropout(x, 0.5, training=True))),
    Case("noise", lambda: With(lambda m, x: x + torch.randn(16))),
    Case("pairs of tokens", lambda: With(lambda m, x: x.view(2, -1, 32).flip(-1).view_as(x))),
    Case("every second token", lambda: With(lambda m, x: x[:, ::2])),
    Case("one token for all", lambda: With(lambda m, x: x.mean(1))),
    Case("tokens first", lambda: With(lambda m, x: x.transpose(0, 1))),
    Case("two outputs", lambda: _Pair()),
    Case("nothing at all", nn.Identity),
    Case("reversed tokens", lambda: With(lambda m, x: x.flip(1))),
    Case("tokens against tokens", lambda: With(lambda m, x: x + (x[:, :, None] * x[:, None]).amax(2))),
    Case("spectrum", lambda: With(lambda m, x: torch.fft.rfft(x, dim=1).abs().mean(1, keepdim=True) + x)),
]


class _Pair(Ffn):
    def forward(self, x: Tensor) -> Any:
        return self.mlp(x), None
