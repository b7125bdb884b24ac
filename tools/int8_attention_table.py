"""How far attention in 8 bits is from float64, beside float16, bfloat16 and the recipes of SageAttention, on inputs of
many kinds. All are computed here in PyTorch operators: ours by its definition, the others as their papers describe.

    python tools/int8_attention_table.py                                # print the table
    python tools/int8_attention_table.py --write docs/int8.md           # put it between the marks in the document
    python tools/int8_attention_table.py --inputs video sink --dims 64
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from int8_table import command
from torch import Tensor

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.launch import int8_definition

BEGIN, END = "<!-- errors of attention: tools/int8_attention_table.py -->", "<!-- end of errors of attention -->"
ROWS, HEADS, KEYS = 192, 2, 4096


class Inputs(NamedTuple):
    """query ``[H, L, D]``, key and value ``[H, S, D]``; is_causal as in ``sdpa``."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False


# ---- inputs ----------------------------------------------------------------------------------------------------------


def normal(
    dim: int, keys: int = KEYS, heads: int = HEADS, rows: int = ROWS, query_size: float = 1.0, key_size: float = 1.0
) -> Inputs:
    query, key, value = (torch.randn(heads, n, dim) for n in (rows, keys, keys))
    return Inputs(query * query_size, key * key_size, value)


def video(dim: int, sharpness: float = 1.0) -> Inputs:
    """Tokens of a video transformer on a grid of 5 x 20 x 30: smooth fields and noise, projected. Query and key are
    RMS-normed, with gains of which a few are large, and have rotary embedding of three axes; keys have a common part.
    Values have a mean, channels of uneven size and a few large tokens."""
    grid, features = (5, 20, 30), 96
    count = math.prod(grid)
    smooth = F.interpolate(torch.randn(1, features, 3, 5, 6), size=grid, mode="trilinear", align_corners=True)
    x = 1.2 * smooth[0].reshape(features, count).T + 0.7 * torch.randn(count, features)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    places = torch.stack(torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij"), -1).reshape(count, 3).double()

    def projected() -> Tensor:
        return torch.einsum("nc,hcd->hnd", x, torch.randn(HEADS, features, dim) / math.sqrt(features))

    def turned(z: Tensor) -> Tensor:
        half = torch.arange(dim // 2)
        frequencies = 10000.0 ** (-(half // 3).double() / (dim // 2 // 3 + 1))
        angles = places[:, half % 3] * frequencies
        cos, sin, pairs = angles.cos().float(), angles.sin().float(), z.unflatten(-1, (-1, 2))
        a, b = pairs.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def normed() -> Tensor:
        z = projected() + 0.5 * torch.randn(HEADS, 1, dim)
        gains = 0.7 + 0.3 * torch.randn(HEADS, 1, dim).abs()
        for head in range(HEADS):
            gains[head, 0, torch.randperm(dim)[:4]] *= 4
        return turned(z / z.square().mean(-1, keepdim=True).sqrt() * gains)

    query, key = normed() * sharpness, normed()
    key = key + torch.randn(HEADS, 1, dim) * 6 * (torch.randn(HEADS, 1, dim).abs() > 1.6)
    value = projected() * (0.4 + torch.randn(HEADS, 1, dim).abs()) + 0.3 * torch.randn(HEADS, 1, dim)
    value[:, torch.randperm(count)[:6]] *= 6
    return Inputs(query[:, torch.randperm(count)[:ROWS]], key, value)


def outliers(dim: int) -> Inputs:
    """A few channels much larger than the others, and a large common key."""
    query, key, value, _ = normal(dim)
    for tensor, count, size in ((query, 4, 3), (key, 4, 6), (value, 3, 10)):
        tensor[..., torch.randperm(dim)[:count]] *= size
    return Inputs(query, key + 10 * torch.randn(HEADS, 1, dim), value + torch.randn(HEADS, 1, dim))


def sink(dim: int, inputs: Inputs | None = None, key_size: float = 1.1, query_size: float = 6.0) -> Inputs:
    """One key has most of the weight, and a small value."""
    query, key, value, _ = normal(dim) if inputs is None else inputs
    direction = F.normalize(torch.randn(dim), dim=0)
    key[:, 5] += direction * math.sqrt(dim) * key_size
    value[:, 5] *= 0.05
    return Inputs(query + query_size * direction, key, value)


def long_sink(dim: int) -> Inputs:
    query, key, value, _ = normal(dim, 70_000, 1, 64, 0.3)
    return sink(dim, Inputs(query, key, value + 0.5 * torch.randn(1, 1, dim)), 2.2, 4.0)


def weighed_sink(dim: int, weight: float, keys: int = 2048, common: bool = True, sinks: int = 1) -> Inputs:
    """One key, or several together, have ``weight`` of the mean row, and small values; the others have a ``common``
    part or none."""
    query, key, value, _ = normal(dim, keys, 1, 64)
    direction = F.normalize(torch.randn(dim), dim=0)
    query += (4 - query @ direction)[..., None] * direction
    key -= (key @ direction)[..., None] * direction
    others = (query @ key[:, sinks:].mT * dim**-0.5).logsumexp(-1).mean()
    key[:, :sinks] = direction * (others + math.log(weight / (1 - weight) / sinks)) * dim**0.5 / 4
    value = value * 0.3 + common * torch.randn(1, 1, dim)
    value[:, :sinks] = torch.randn(sinks, dim) * 0.02
    return Inputs(query, key, value)


def uneven(dim: int) -> Inputs:
    query, key, value, _ = normal(dim)
    return Inputs(query, key, value * torch.randn(HEADS, KEYS, 1).exp())


INPUTS: dict[str, Callable[[int], Inputs]] = {
    "normal": normal,
    "video": video,
    "video, sharp": lambda dim: video(dim, 2.0),
    "video, soft": lambda dim: video(dim, 0.4),
    "outlier channels": outliers,
    "peaked": lambda dim: normal(dim, query_size=3.0, key_size=1.5),
    "sink": sink,
    "uneven values": uneven,
    "causal": lambda dim: normal(dim, 700, rows=700)._replace(is_causal=True),
    "flat, 70,000 keys": lambda dim: normal(dim, 70_000, 1, 64, 0.1),
    "sink, 70,000 keys": long_sink,
    "sink of 50 %": lambda dim: weighed_sink(dim, 0.5),
    "sink of 90 %": lambda dim: weighed_sink(dim, 0.9),
    "sink of 99 %": lambda dim: weighed_sink(dim, 0.99),
    "two sinks of 90 %": lambda dim: weighed_sink(dim, 0.9, sinks=2),
    "two sinks of 99 %": lambda dim: weighed_sink(dim, 0.99, sinks=2),
    "two sinks of 99 %, nothing in common": lambda dim: weighed_sink(dim, 0.99, common=False, sinks=2),
    "sink of 90 %, 70,000 keys": lambda dim: weighed_sink(dim, 0.9, 70_000),
    "sink of 99 %, 70,000 keys": lambda dim: weighed_sink(dim, 0.99, 70_000),
}

# ---- methods ---------------------------------------------------------------------------------------------------------


def _scores(inputs: Inputs, query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if inputs.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


def exact(inputs: Inputs) -> Tensor:
    query, key, value = (t.double() for t in inputs[:3])
    return _scores(inputs, query, key).softmax(-1) @ value


def rounded(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Plain attention: inputs, scores, probabilities and output in ``dtype``, sums in float32."""

    def of(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    query, key, value = (of(t) for t in inputs[:3])
    return of(of(of(_scores(inputs, query, key)).softmax(-1)) @ value)


def ours(inputs: Inputs) -> Tensor:
    call = check_call(*(t[None] for t in inputs[:3]), is_causal=inputs.is_causal)
    out = torch.empty(call.out_shape)
    int8_definition.compute(call, out)
    return out[0]


def _centred(key: Tensor) -> Tensor:
    return key.double() - key.double().mean(1, keepdim=True)


def sage1(inputs: Inputs) -> Tensor:
    """SageAttention: a scale for 128 rows of Q and 64 of K without their mean, P and V in float16."""
    scores = _scores(inputs, _in_8_bits(inputs.query.double(), 128), _in_8_bits(_centred(inputs.key), 64))
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    return probs.half().double() @ inputs.value.half().double() / probs.sum(-1, keepdim=True)


def sage2(inputs: Inputs) -> Tensor:
    """SageAttention2 with 8 bits: a scale for 4 rows of Q and 16 of K, as a thread has them. P is in e4m3 against the
    running maximum of 64 keys, V in e4m3 with a scale for each channel."""
    scores = _scores(inputs, _in_8_bits(inputs.query.double(), 1, 8, 4), _in_8_bits(_centred(inputs.key), 2, 4, 8))
    tiles = F.pad(scores, (0, -scores.shape[-1] % 64), value=-math.inf).unflatten(-1, (-1, 64))
    running = tiles.amax(-1).cummax(-1).values.clamp_min(-1e30)
    probs = (tiles - running[..., None]).exp()
    fade = (running - running[..., -1:]).exp()[..., None]
    scale = inputs.value.double().abs().amax(1, keepdim=True).clamp_min(1e-30) / 448
    value = _e4m3(inputs.value.double() / scale) * scale
    weights = (_e4m3(probs * 448) / 448 * fade).flatten(-2)[..., : scores.shape[-1]]
    return weights @ value / (probs * fade).sum((-1, -2))[..., None]


def _in_8_bits(x: Tensor, rows: int, threads: int = 1, times: int = 1) -> Tensor:
    """The tensor in 8 bits with one scale for ``rows`` neighbouring rows; of ``threads`` threads that take so many each
    in turn, with one scale for what a thread has after so many ``times``."""
    of_threads = F.pad(x, (0, 0, 0, -x.shape[1] % (rows * threads * times))).unflatten(1, (-1, times, threads, rows))
    scale = of_threads.abs().amax((2, 4, 5), keepdim=True).clamp_min(1e-30) / 127
    return ((of_threads / scale).round() * scale).flatten(1, 4)[:, : x.shape[1]]


def _e4m3(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).double()


METHODS: dict[str, Callable[[Inputs], Tensor]] = {
    "float16": lambda inputs: rounded(inputs, torch.float16),
    "bfloat16": lambda inputs: rounded(inputs, torch.bfloat16),
    "SageAttention": sage1,
    "SageAttention 2": sage2,
    "**ours**": ours,
}


def errors(name: str, dim: int) -> tuple[dict[str, float], float]:
    """(relative error of each method, root of the sum of squares over heads and rows; the largest of a row of ours)."""
    torch.manual_seed(1)
    inputs = INPUTS[name](dim)
    right = exact(inputs)
    wrong = {method: compute(inputs).double() - right for method, compute in METHODS.items()}
    worst = (wrong["**ours**"].norm(dim=-1) / right.norm(dim=-1)).max().item()
    return {method: (each.norm() / right.norm()).item() for method, each in wrong.items()}, worst


def table(inputs: list[str], dims: list[int]) -> str:
    """The table in Markdown."""
    lines = ["| inputs | head_dim | " + " | ".join(METHODS) + " | ours, worst row |", "|---|---|" + "---|" * 6]
    for name in inputs:
        for dim in dims:
            found, worst = errors(name, dim)
            cells = [f"{error:.2%}" for error in (*found.values(), worst)]
            lines.append(f"| {name} | {dim} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    inputs = {"nargs": "*", "default": list(INPUTS), "choices": list(INPUTS)}
    command(__doc__, (BEGIN, END), table, inputs=inputs, dims={"nargs": "*", "type": int, "default": [64, 128]})
