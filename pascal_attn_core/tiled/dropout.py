"""Attention dropout without a stored mask: each score's coin is a hash of (seed, head and query row, key).

The same coordinates give the same coin whatever the tiles, so the backward pass, which walks other tiles, draws the
same mask. The mixing steps are those of MurmurHash3's 32-bit finaliser, on int32 with wrap-around, without its last
xor, which leaves the upper bits as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROW_STEP, _KEY_STEP = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)  # odd 64-bit constants
_MIX = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
BYTES_PER_SCORE = 8  # two int32


def draw_seed(device: torch.device) -> Tensor:
    """One int64 ``[1]`` from the device's own generator: repeatable by ``torch.manual_seed``, kept by checkpointing,
    and never read by the host."""
    return torch.randint(-(1 << 62), 1 << 62, (1,), dtype=torch.int64, device=device)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ (x >> 30)) * _KEY_STEP
    x = (x ^ (x >> 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31)


def block_row_codes(seed: Tensor, first_unit: int, shape: torch.Size, groups: int, seq_len_q: int, q0: int) -> Tensor:
    """int32 codes ``[u, rows]`` of a block of query rows, ordered by token, then by head of the group.

    Args:
        shape: ``[u, rows, ...]``; first_unit: number of its first unit in the call; q0: its first token.
    The number of a row is (unit * groups + head of the group) * seq_len_q + token.
    """
    device = seed.device
    units = torch.arange(first_unit, first_unit + shape[0], device=device)[:, None, None]
    tokens = torch.arange(q0, q0 + shape[1] // groups, device=device)[:, None]
    heads = torch.arange(groups, device=device)
    rows = ((units * groups + heads) * seq_len_q + tokens).flatten(1)
    return _mix64(rows * _ROW_STEP + seed).to(torch.int32)


def key_codes(seed: Tensor, first: int, last: int) -> Tensor:
    """int32 ``[last - first]`` code of each key."""
    keys = torch.arange(first, last, dtype=torch.int64, device=seed.device)
    return _mix64(keys * _KEY_STEP - seed).to(torch.int32)


def draw_coins(shape: torch.Size, row_code: Tensor, key_code: Tensor, dropout_p: float, scratch: Tensor) -> Tensor:
    """float32 ``[U, R, T]`` in the scratch memory: 0 where an element is dropped, 1 where it is kept.

    Args:
        row_code: int32 ``[U, R]``; key_code: int32 ``[T]``.
        scratch: uint8, at least ``BYTES_PER_SCORE * U * R * T`` bytes.
    """
    count = shape.numel()
    words = scratch[: BYTES_PER_SCORE * count].view(torch.int32)
    code, shifted = words[:count].view(shape), words[count:].view(shape)
    torch.bitwise_xor(row_code[..., None], key_code, out=code)
    for shift, factor in zip((16, 13), _MIX):
        torch.bitwise_right_shift(code, shift, out=shifted)
        shifted.bitwise_and_((1 << 32 - shift) - 1)  # int32 shifts copies of the sign in: they would cancel it
        code.bitwise_xor_(shifted).mul_(factor)
    # The codes are uniform over the int32 range: a share dropout_p of them lies below the threshold.
    threshold = min(round(dropout_p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    torch.ge(code, threshold, out=shifted)
    return code.view(torch.float32).copy_(shifted)
