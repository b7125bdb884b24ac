"""The names of pascal-attn 0.1.0, for code written against it: ``tiled_attention``, ``TiledAttention``,
``recommended_tile_size``. Same arguments and layouts; bool masks, dropout and gradients work as well.

    from pascal_attn_core.compat import install_as_pascal_attn

    install_as_pascal_attn()                                # then: import pascal_attn, pascal_attn.hf ...
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor, nn

from .attention import sdpa
from .config import default_config
from .machine.device import MIB, device_info
from .patching.patch import Patch
from .patching.stand_in import Installer, StandIn

__all__ = ["TiledAttention", "device_l2_mb", "install_as_pascal_attn", "recommended_tile_size", "tiled_attention"]

_ROOT = "pascal_attn"
_STAND_IN = StandIn(
    f"{_ROOT}==0.1.0",
    {
        _ROOT: (".compat: TiledAttention recommended_tile_size tiled_attention",),
        f"{_ROOT}.functional": (".compat: tiled_attention",),
        f"{_ROOT}.nn": (".compat: TiledAttention",),
        f"{_ROOT}.hf": (".transformers: make_hf_attention_fn register_with_transformers",),
        f"{_ROOT}._core": (".compat: tiled_attention",),
        f"{_ROOT}._gpu": (".compat: device_l2_mb recommended_tile_size",),
    },
    package=__name__.rpartition(".")[0],
)
_installer = Installer(_ROOT)


def install_as_pascal_attn(*, replace: bool = False) -> Patch:
    """Make ``import pascal_attn`` and its modules (``functional``, ``nn``, ``hf``) find our functions.

    Code that imported the name earlier keeps what it found: call this first. ``pascal_attn.hf`` needs Transformers.

    Args:
        replace: replace the real package if it is installed.
    Returns:
        A Patch; ``.remove()`` removes our modules and restores what was there before.
    Raises:
        RuntimeError: the real package is installed.
    """
    return _installer.install(lambda: _STAND_IN, replace=replace)


def recommended_tile_size(device: torch.device | str | int | None = None) -> int:
    """64, 128 or 256 tokens by the L2 cache size that the device's driver reports: 64 up to 4 MiB (GTX 10xx, P40, T4),
    128 up to 12 MiB (V100, RTX 20xx, RTX 3090), else 256.

    Args:
        device: a CUDA device, its name or index; None = the current CUDA device. Without CUDA, or for a device whose
            L2 is unknown, the answer is 256. The tiles of the route ``tiled`` are not chosen by it.
    """
    l2_bytes = _l2_bytes(device)
    if 0 < l2_bytes <= 4 * MIB:
        return 64
    return 128 if 0 < l2_bytes <= 12 * MIB else 256


def device_l2_mb(device: torch.device | str | int | None = None) -> float:
    """The L2 cache of a device in MiB; 0 where it is unknown, and on a CPU. ``device`` as above."""
    return _l2_bytes(device) / MIB


def _l2_bytes(device: torch.device | str | int | None) -> int:
    if device is None or isinstance(device, int):
        device = torch.device("cuda") if device is None else torch.device("cuda", device)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        return 0
    info = device_info(device)
    return info.l2_bytes if info.is_gpu else 0


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    mask: Tensor | None = None,
    tile_size: int | None = 64,
    dropout_p: float = 0.0,
) -> Tensor:
    """Tiled attention with pascal-attn's arguments.

    Args:
        query: ``[B, Hq, L, D]``; key, value: ``[B, Hkv, S, D]``, Hq a multiple of Hkv.
        mask: broadcasts to ``[B, Hq, L, S]``; float (added) or bool (True = takes part).
        tile_size: query and key tokens per tile; None = chosen from device, shapes and budget, which is much faster.
        others: as in :func:`pascal_attn_core.sdpa`.
    Returns:
        ``[B, L, Hq, D]``: tokens before heads, unlike ``sdpa``.
    Raises:
        ValueError: invalid shapes, or Hq is not a multiple of Hkv.
    """
    config = replace(default_config(), route="tiled", q_block=tile_size, kv_block=tile_size)
    out = sdpa(query, key, value, mask, dropout_p, scale=scale, enable_gqa=True, config=config)
    return out.transpose(1, 2)


class TiledAttention(nn.Module):
    """Attention without parameters, on packed or unpacked inputs, as in pascal-attn.

    Args:
        n_kv_heads: None = n_heads; head_dim: None = read from the input.
        tile_size: tokens per tile, or ``"auto"``: the tile shape that :mod:`pascal_attn_core.tiled.tiles` chooses.
        dropout: share of the probabilities dropped while training.
    Shape:
        query ``[B, L, Hq * D]`` or ``[B, L, Hq, D]``, key and value ``[B, S, Hkv * D]`` or ``[B, S, Hkv, D]``;
        the output has the form of query.
    Raises:
        ValueError: n_heads is not a multiple of n_kv_heads, or an input does not have these sizes.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        tile_size: int | str = "auto",
        dropout: float = 0.0,
        scale: float | None = None,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of (divisible by) n_kv_heads, got {n_heads} and {n_kv_heads}")
        if isinstance(tile_size, str) and tile_size != "auto":
            raise ValueError(f"tile_size must be a whole number or 'auto', got {tile_size!r}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.tile_size, self.dropout, self.scale = tile_size, dropout, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of query over key and value; ``mask`` broadcasts to ``[B, Hq, L, S]``."""
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        packed = query.dim() == 3
        query, key, value = (self._heads_first(t, h) for t, h in zip((query, key, value), heads))
        tile_size = None if isinstance(self.tile_size, str) else self.tile_size
        dropout_p = self.dropout if self.training else 0.0
        out = tiled_attention(query, key, value, self.scale, mask, tile_size, dropout_p)
        return rearrange(out, "b n h d -> b n (h d)") if packed else out

    def _heads_first(self, tensor: Tensor, heads: int) -> Tensor:
        """``[B, N, heads * D]`` or ``[B, N, heads, D]`` -> ``[B, heads, N, D]``."""
        if tensor.dim() == 3 and tensor.shape[2] % heads == 0:
            tensor = rearrange(tensor, "b n (h d) -> b n h d", h=heads)
        fits = tensor.dim() == 4 and tensor.shape[2] == heads
        if not fits or (self.head_dim is not None and tensor.shape[3] != self.head_dim):
            dim = "head_dim" if self.head_dim is None else self.head_dim
            forms = f"[B, N, {heads} * {dim}] or [B, N, {heads}, {dim}]"
            raise ValueError(f"input must be {forms}, got {tuple(tensor.shape)}")
        return tensor.transpose(1, 2)
