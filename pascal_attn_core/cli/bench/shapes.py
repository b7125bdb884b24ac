"""The shapes of ``pascal-attn bench``: attention calls as real models make them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...call import Arguments

_VALID_SHARE = 0.6
_MAX_SIZE = (1 << 31) - 1
Thing = TypeVar("Thing", bound=Any)  # anything with a name


@dataclass(frozen=True)
class Shape:
    """One attention call to time. Shape legend as everywhere: B Hq Hkv L S D.

    Attributes:
        mask: ``"none"``; ``"bool"``: ``[1, 1, L, S]``, half of it allowed; ``"padding"``: bool ``[B, 1, 1, S]``, the
            last keys (40 % on average) left out; ``"bias"``: float ``[1, Hq, L, S]``.
    """

    name: str
    what: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    mask: str = "none"
    is_causal: bool = False
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes of query, key, value and output."""
        rows = self.num_heads * self.seq_len_q + self.num_kv_heads * self.seq_len_kv
        return self.batch * rows * 2 * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def text(self) -> str:
        """``"B2 H10 N4096 D64 float32"``."""
        heads = f"H{self.num_heads}" + (f"/{self.num_kv_heads}" if self.num_heads != self.num_kv_heads else "")
        same = self.seq_len_q == self.seq_len_kv
        tokens = f"N{self.seq_len_q}" if same else f"{self.seq_len_q}x{self.seq_len_kv}"
        rule = " causal" if self.is_causal else ""
        mask = "" if self.mask == "none" else f" mask {self.mask}"
        return f"B{self.batch} {heads} {tokens} D{self.head_dim} {self.dtype}{rule}{mask}"

    def make(self, device: torch.device | str = "cpu", *, seed: int = 0) -> Arguments:
        """The tensors of this shape: normal random numbers, the same for every run with this seed."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)

        def normal(*size: int) -> Tensor:
            if torch.device(device).type == "meta":  # there are no numbers to draw
                return torch.empty(size, dtype=dtype, device=device)
            return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

        return Arguments(
            query=normal(self.batch, self.num_heads, self.seq_len_q, self.head_dim),
            key=normal(self.batch, self.num_kv_heads, self.seq_len_kv, self.head_dim),
            value=normal(self.batch, self.num_kv_heads, self.seq_len_kv, self.head_dim),
            attn_mask=self._mask(generator, device, dtype),
            is_causal=self.is_causal,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )

    def _mask(self, generator: torch.Generator, device: torch.device | str, dtype: torch.dtype) -> Tensor | None:
        rows, keys = self.seq_len_q, self.seq_len_kv
        if self.mask == "none":
            return None
        if self.mask == "bool":
            return (torch.rand(1, 1, rows, keys, generator=generator) < 0.5).to(device)
        if self.mask == "bias":
            return torch.randn(1, self.num_heads, rows, keys, generator=generator).to(device=device, dtype=dtype)
        # Lengths differ from sample to sample, as in a padded batch of prompts.
        spread = torch.linspace(-0.15, 0.15, self.batch) if self.batch > 1 else torch.zeros(1)
        lengths = ((_VALID_SHARE + spread) * keys).long().clamp(1, keys)
        return (torch.arange(keys) < lengths[:, None])[:, None, None, :].to(device)


SHAPES = (
    Shape("sd15", "Stable Diffusion 1.5, 512x512, first level", 2, 8, 8, 4096, 4096, 40),
    Shape("sdxl", "SDXL, 1024x1024, second level", 2, 10, 10, 4096, 4096, 64),
    Shape("sdxl_bf16", "SDXL in bfloat16", 2, 10, 10, 4096, 4096, 64, dtype="bfloat16"),
    Shape("gqa", "grouped heads of an LLM's prompt", 4, 32, 8, 2048, 2048, 64),
    Shape("flux", "Flux, 1024x1024 and 512 text tokens", 1, 24, 24, 4608, 4608, 128),
    Shape("wan", "Wan video (two of its heads on a CPU)", 1, 12, 12, 16384, 16384, 128),
    Shape("cross77", "cross attention to a CLIP prompt", 2, 8, 8, 16384, 77, 64),
    Shape("cross512", "cross attention to a T5 prompt", 2, 8, 8, 16384, 512, 64),
    Shape("causal", "causal prompt", 1, 16, 16, 2048, 2048, 64, is_causal=True),
    Shape("decode", "one new token of an LLM", 8, 32, 8, 1, 4096, 64),
    Shape("vae", "VAE mid block, 512x512", 1, 1, 1, 4096, 4096, 512),
    Shape("mask_bool", "bool mask of the full size", 1, 16, 16, 2048, 2048, 64, mask="bool"),
    Shape("mask_padding", "padded batch", 4, 16, 16, 2048, 2048, 64, mask="padding"),
    Shape("mask_bias", "bias per head, as T5 has it", 1, 16, 16, 2048, 2048, 64, mask="bias"),
)
QUICK = ("gqa", "cross77", "causal", "decode", "mask_bool", "mask_padding", "mask_bias")


def choose_shapes(patterns: str, *, device_type: str = "cpu", dtype: str | None = None) -> list[Shape]:
    """The shapes that :func:`choose` finds, of ``dtype`` if that is given; on a CPU the video shape keeps two heads."""
    shapes = choose("shape", SHAPES, patterns, QUICK)
    if device_type == "cpu":
        shapes = [replace(s, num_heads=2, num_kv_heads=2) if s.name == "wan" else s for s in shapes]
    return shapes if dtype is None else [replace(shape, dtype=dtype) for shape in shapes]


# the names of --shape and their fields; those without a default are required
_SIZES = {"B": "batch", "Hq": "num_heads", "Hkv": "num_kv_heads", "L": "seq_len_q", "S": "seq_len_kv", "D": "head_dim"}


def own_shapes(texts: Sequence[str], *, is_causal: bool = False, dtype: str = "float32") -> list[Shape]:
    """Shapes by texts as ``"B=1,Hq=32,Hkv=8,L=2048,D=64"``, named own, or own1, own2, ... where there are several. B,
    Hkv and S may be left out: 1, as many as Hq, as many as L. ValueError for a text that is no shape."""
    shapes = []
    for number, text in enumerate(texts, start=1):
        sizes = _read_sizes(text)
        sizes = {"B": 1, "Hkv": sizes["Hq"], "S": sizes["L"]} | sizes
        if sizes["Hq"] % sizes["Hkv"]:
            raise ValueError(f"--shape must have Hq a multiple of Hkv, got {sizes['Hq']} and {sizes['Hkv']}")
        fields = {_SIZES[name]: size for name, size in sizes.items()}
        name = f"own{number}" if len(texts) > 1 else "own"
        shapes.append(Shape(name, "given by --shape", **fields, is_causal=is_causal, dtype=dtype))  # type: ignore[arg-type]
    return shapes


def _read_sizes(text: str) -> dict[str, int]:
    """``"L=2048,D=64"`` -> ``{"L": 2048, "D": 64}``; ValueError for an unknown, missing or repeated name, and for a
    number that is no size."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _SIZES or name in sizes:
            again = " once" if name in sizes else ""
            raise ValueError(f"--shape must name each of {list(_SIZES)}{again} as in L=2048, got {part.strip()!r}")
        if not number.isascii() or not number.isdigit() or len(number) > 10 or not 1 <= int(number) <= _MAX_SIZE:
            raise ValueError(f"{name} in --shape must be a whole number from 1 to {_MAX_SIZE}, got {number!r}")
        sizes[name] = int(number)
    missing = [name for name in ("Hq", "L", "D") if name not in sizes]
    if missing:
        raise ValueError(f"--shape must give {', '.join(missing)}, got {text!r}")
    return sizes


# ---- what options name -----------------------------------------------------------------------------------------------


def choose(
    what: str, things: Iterable[Thing], patterns: str, quick: Sequence[str] = (), prefix: str = ""
) -> list[Thing]:
    """The things named by a comma-separated list of names or patterns (``"sd*,gqa"``, ``"quick"``, ``"all"``), each
    once, in the order of the patterns. ``prefix`` may be left out of a name. ValueError for a pattern without a match.
    """
    by_name = {thing.name: thing for thing in things}
    chosen: dict[str, Thing] = {}
    for pattern in filter(None, map(str.strip, patterns.split(","))):
        wanted = "*" if pattern == "all" else pattern
        found = [n for n in by_name if fnmatch.fnmatch(n, wanted) or fnmatch.fnmatch(n.removeprefix(prefix), wanted)]
        found = list(quick) if pattern == "quick" else found
        if not found:
            known = ", ".join(["all", *(["quick"] if quick else []), *by_name])
            raise ValueError(f"{what} must be one of [{known}] or a pattern, got {pattern!r}")
        chosen |= {name: by_name[name] for name in found}
    return list(chosen.values())
