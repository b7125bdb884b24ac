"""The table of cases that drives every route: shapes x memory layouts x masks x rules x dtypes."""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import check_call
from pascal_attn_core.routes import why_not

from .fuzz import calls

ROUTES = {
    "auto": AttentionConfig(math_limit_mib=0),  # else torch takes calls as short as these unseen
    "tiled": AttentionConfig(route="tiled"),
    "online": AttentionConfig(route="tiled", softmax="online"),
    "small_tiles": AttentionConfig(route="tiled", q_block=48, kv_block=11),
    # Some of them lie within a window of 20 keys.
    "tiny_tiles": AttentionConfig(route="tiled", softmax="online", q_block=13, kv_block=7, trim_masks=False),
    "small_budget": AttentionConfig(route="tiled", budget_mib=1 / 16),
    "torch": AttentionConfig(route="torch"),
    "math": AttentionConfig(route="math", math_limit_mib=1 << 20),
}
BY_TORCH = ("auto", "torch")  # routes that may hand a call to torch's kernels


@dataclass(frozen=True)
class Case:
    """One attention call without its numbers. Shapes are those of the tensors; ``mask`` a key of MASKS."""

    name: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: str = "none"
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    magnitude: float = 1.0

    def build(self, *, requires_grad: bool = False, device: str = "cpu") -> tuple[list[Tensor | None], dict[str, Any]]:
        """([query, key, value, attn_mask], keyword arguments), always with the same numbers."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        shapes = (self.query, self.key, self.value)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        tensors[0] *= self.magnitude
        tensors = [LAYOUTS[self.layout](t.to(self.dtype), generator)[0] for t in tensors]
        mask = self._mask(generator)
        inputs: list[Tensor | None] = [None if t is None else t.to(device) for t in (*tensors, mask)]
        if requires_grad:
            inputs = [t if t is None or t.dtype == torch.bool else t.detach().requires_grad_() for t in inputs]
        return inputs, dict(self.options)

    def _mask(self, generator: torch.Generator) -> Tensor | None:
        lead = torch.broadcast_shapes(self.query[:-3], self.key[:-3], self.value[:-3])
        heads = max(s[-3] if len(s) > 2 else 1 for s in (self.query, self.key, self.value))
        full = (*lead, *((heads,) if len(self.query) > 2 else ()), self.query[-2], self.key[-2])
        return MASKS[self.mask](full, self.dtype, generator)


LAYOUTS = {
    "contiguous": calls.LAYOUTS["contiguous"],
    "tokens_first": calls.LAYOUTS["heads in tokens"],
    "columns_first": calls.LAYOUTS["columns first"],
    "sliced": lambda tensor, _: torch.cat([tensor, torch.full_like(tensor, math.nan)], dim=-1).chunk(2, dim=-1),
    "expanded": calls.LAYOUTS["stride 0 batch"],
    "every_second_token": calls.LAYOUTS["every second token"],
}


def _shape(full: tuple[int, ...], keep: str) -> tuple[int, ...]:
    """The full mask shape with the dimensions in ``keep`` kept and the others 1; a capital cuts those before it."""
    names = "b" * (len(full) - 3) + "hls"[-min(3, len(full)) :]
    shape = tuple(n if name in keep.lower() else 1 for name, n in zip(names, full))
    first = next((c.lower() for c in keep if c.isupper()), "none")
    return shape[names.index(first) :] if first in names else shape


def _bool(keep: str, share: float = 0.7):
    return lambda full, dtype, generator: torch.rand(_shape(full, keep), generator=generator) < share


def _float(keep: str, dtype_: torch.dtype | None = None, size: float = 2.0):
    return lambda full, dtype, generator: (torch.randn(_shape(full, keep), generator=generator) * size).to(
        dtype_ or dtype
    )


def _padding(full, dtype, generator):
    """The first keys, of another number for each batch element."""
    shape = _shape(full, "bs")
    elements, keys = math.prod(shape[:-1]), shape[-1]
    kept = (keys * torch.arange(1, elements + 1) // (elements + 1)).clamp(min=1)
    return (torch.arange(keys) < kept[:, None]).view(shape)


def _some_rows_empty(full, dtype, generator):
    mask = _bool("bhls")(full, dtype, generator)
    mask[..., ::3, :] = False
    return mask


def _as_float(make, value: float | str):
    """A bool mask as 0 and -inf, or a finite stand-in."""

    def masked(full, dtype, generator):
        allowed = make(full, dtype, generator)
        low = torch.finfo(dtype).min if value == "finfo" else float(value)
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, low)

    return masked


def _blocks(full, dtype, generator):
    """Whole tiles allowed, forbidden and mixed."""
    mask = torch.zeros(_shape(full, "Ls"), dtype=torch.bool)
    length, keys = mask.shape
    mask[: length // 2, : keys // 2] = True
    mask[length // 2 :, keys // 3 :] = torch.rand(length - length // 2, keys - keys // 3, generator=generator) < 0.5
    return mask


MASKS = {
    "none": lambda full, dtype, generator: None,
    "bool [S]": _bool("S"),
    "bool [L, S]": _bool("Ls"),
    "bool [B, 1, 1, S]": _bool("bs"),
    "bool [B, 1, L, S]": _bool("bls"),
    "bool [1, H, 1, S]": _bool("hs"),
    "bool [B, H, L, S]": _bool("bhls"),
    "bool [1, 1, L, 1]": _bool("l"),
    "bool [1, 1, 1, 1]": _bool("", share=2.0),
    "bool some rows empty": _some_rows_empty,
    "bool nothing allowed": _bool("Ls", share=0.0),
    "bool everything allowed": _bool("Ls", share=2.0),
    "bool padding": _padding,
    "bool padding on the left": lambda *given: _padding(*given).flip(-1),
    "bool blocks": _blocks,
    "bool expanded": lambda full, *given: _bool("S")(full, *given).expand(full),
    "float [S]": _float("S"),
    "float [L, S]": _float("Ls"),
    "float [B, 1, 1, S]": _float("bs"),
    "float [1, H, L, S]": _float("hls"),
    "float [B, H, L, S]": _float("bhls"),
    "float [1, 1, L, 1]": _float("l"),
    "float columns first": lambda *given: LAYOUTS["columns_first"](_float("bls")(*given), None)[0],
    "float large": _float("bhls", size=100.0),
    "float32 mask": _float("Ls", torch.float32),
    "float64 mask": _float("Ls", torch.float64),
    "float16 mask": _float("Ls", torch.float16),
    "bfloat16 mask": _float("Ls", torch.bfloat16),
    "-inf padding": _as_float(_padding, "-inf"),
    "-finfo.max padding": _as_float(_padding, "finfo"),
    "-1e4 padding": _as_float(_padding, -1e4),
    "-inf some rows empty": _as_float(_some_rows_empty, "-inf"),
    "-finfo.max some rows": _as_float(_some_rows_empty, "finfo"),
    "-1e4 some rows": _as_float(_some_rows_empty, -1e4),
    "-inf everywhere": _as_float(_bool("Ls", share=0.0), "-inf"),
    "-finfo.max everywhere": _as_float(_bool("Ls", share=0.0), "finfo"),
}


def case(name: str, heads: int, kv_heads: int, seq_len_q: int, seq_len_kv: int, head_dim: int, head_dim_v: int = 0,
         *, batch: tuple[int, ...] = (2,), **rest: Any) -> Case:  # fmt: skip
    """A case by its sizes."""
    options = rest.pop("options", {})
    if heads != kv_heads:
        options = {"enable_gqa": True, **options}
    kv = (*batch, kv_heads, seq_len_kv)
    query = (*batch, heads, seq_len_q, head_dim)
    return Case(name, query, (*kv, head_dim), (*kv, head_dim_v or head_dim), options=options, **rest)


SQUARE = case("square", 2, 2, 67, 67, 16)
GROUPED = case("grouped", 6, 2, 33, 70, 16, 24)
ONE_KV_HEAD = case("one kv head", 4, 1, 70, 33, 8)
DECODE = case("decode", 8, 2, 1, 300, 16)
LONGER = case("longer", 1, 1, 90, 130, 8, batch=(1,))
SHAPES = (SQUARE, GROUPED, ONE_KV_HEAD, DECODE, LONGER)


def _with(base: Case, what: str, **changes: Any) -> Case:
    options = {**base.options, **changes.pop("options", {})}
    return replace(base, name=f"{base.name}, {what}", options=options, **changes)


def _rules() -> list[Case]:
    rules = {
        "causal": {"is_causal": True},
        "causal lower right": {"is_causal": True, "alignment": "lower_right"},
        "window (9, 4)": {"window": (9, 4)},
        "window (0, 0)": {"window": (0, 0)},
        "window (-1, 3) lower right": {"window": (-1, 3), "alignment": "lower_right"},
        "window (5, -1)": {"window": (5, -1)},
        "causal window (20, 0)": {"window": (20, 0), "is_causal": True},
        "causal window (20, 0) lower right": {"window": (20, 0), "is_causal": True, "alignment": "lower_right"},
        "scale 0": {"scale": 0.0},
        "scale -0.7": {"scale": -0.7},
        "scale 1": {"scale": 1.0},
        "scale 0 causal": {"scale": 0.0, "is_causal": True},
        "scale -0.7 causal": {"scale": -0.7, "is_causal": True},
    }
    cases = [_with(base, what, options=options) for base in SHAPES for what, options in rules.items()]
    both = ("bool [B, H, L, S]", "float [1, H, L, S]", "-inf padding", "bool padding", "-finfo.max padding")
    for base in (GROUPED, LONGER):
        for mask in both:
            for what in ("causal", "window (9, 4)", "causal window (20, 0) lower right"):
                cases.append(_with(base, f"{what}, {mask}", mask=mask, options=rules[what]))
    return cases


def _odd_shapes() -> list[Case]:
    cases = [
        case("no queries", 2, 2, 0, 5, 8),
        case("no keys", 2, 2, 5, 0, 8),
        case("no batch elements", 2, 2, 5, 5, 8, batch=(0,)),
        case("no heads", 0, 0, 5, 5, 8),
        case("no head_dim", 2, 2, 5, 7, 0, 8),
        case("no head_dim_v", 2, 2, 5, 7, 8, 0),
        case("one of everything", 1, 1, 1, 1, 1, batch=(1,)),
        case("head_dim 1", 2, 2, 40, 50, 1),
        case("head_dim_v 1", 2, 2, 40, 50, 8, 1),
        case("head_dim 300", 1, 1, 20, 30, 300, batch=(1,)),
        case("one key", 2, 2, 40, 1, 8),
        case("no batch dimension", 3, 3, 40, 50, 8, batch=()),
        case("no batch dimension, grouped", 4, 2, 40, 50, 8, batch=()),
        case("two batch dimensions", 2, 2, 40, 50, 8, batch=(2, 3)),
        case("two batch dimensions, grouped", 4, 2, 40, 50, 8, batch=(2, 3)),
        case("two batch dimensions, tokens first", 2, 2, 40, 50, 8, batch=(2, 3), layout="tokens_first"),
        Case("matrices", (40, 8), (50, 8), (50, 12)),
        Case("matrices, causal", (40, 8), (50, 8), (50, 12), options={"is_causal": True}),
        Case("one query for all", (1, 2, 40, 8), (3, 2, 50, 8), (3, 2, 50, 8)),
        Case("one key and value for all", (3, 2, 40, 8), (1, 2, 50, 8), (1, 2, 50, 8)),
        Case("one head, one key and value for all", (3, 1, 40, 8), (1, 1, 50, 8), (1, 1, 50, 8)),
        Case("key and value without batch", (3, 2, 40, 8), (2, 50, 8), (2, 50, 8)),
        Case("more batch dimensions in key", (2, 2, 40, 8), (3, 1, 2, 50, 8), (3, 2, 2, 50, 8)),
        Case("heads broadcast from key and value", (2, 4, 40, 8), (2, 1, 50, 8), (2, 1, 50, 8)),
        Case("heads broadcast from query", (2, 1, 40, 8), (2, 4, 50, 8), (2, 4, 50, 8)),
        Case("heads broadcast from value", (2, 4, 40, 8), (2, 4, 50, 8), (2, 1, 50, 8)),
        Case("heads of matrices", (3, 40, 8), (50, 8), (50, 8)),
    ]
    masked = ("matrices", "two batch dimensions", "no batch dimension, grouped", "key and value without batch",
              "heads broadcast from query", "one query for all", "no keys", "no queries")  # fmt: skip
    kinds = ("bool [B, H, L, S]", "float [L, S]")
    return cases + [_with(c, mask, mask=mask) for c in cases if c.name in masked for mask in kinds]


def _table() -> list[Case]:
    cases = [*SHAPES, *_rules(), *_odd_shapes()]
    cases += [_with(base, mask, mask=mask) for base in SHAPES for mask in MASKS if mask != "none"]
    cases += [_with(base, layout, layout=layout) for base in SHAPES for layout in LAYOUTS if layout != "contiguous"]
    cases += [
        _with(GROUPED, f"{layout}, {mask}", layout=layout, mask=mask)
        for layout in LAYOUTS
        for mask in ("bool [B, 1, 1, S]", "float [B, H, L, S]", "bool some rows empty")
    ]
    masks = ("bool [B, H, L, S]", "float [L, S]", "float32 mask", "-finfo.max padding", "-inf some rows empty")
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        for base in SHAPES:
            cases.append(_with(base, name, dtype=dtype))
            cases.append(_with(base, f"{name} causal", dtype=dtype, options={"is_causal": True}))
            for mask in masks:
                cases.append(_with(base, f"{name} {mask}", dtype=dtype, mask=mask))
        cases.append(_with(GROUPED, f"{name} tokens first", dtype=dtype, layout="tokens_first"))
    for magnitude in (0.0, 30.0, 1e3):
        cases += [_with(base, f"magnitude {magnitude:g}", magnitude=magnitude) for base in (SQUARE, GROUPED)]
    return cases


TABLE = _table()


def routes_for(case: Case, *, of: Iterable[str] = ROUTES) -> list[str]:
    """Return the routes of ``of`` that take the call. Tiny tiles take every third, and all with a window."""
    inputs, options = case.build()
    call = check_call(*inputs, **options)
    routes = [route for route in of if route == "auto" or not why_not(ROUTES[route].route, call, ROUTES[route])]
    if "window" not in case.options and zlib.crc32(case.name.encode()) % 3:
        routes = [route for route in routes if route != "tiny_tiles"]
    return routes


def on_mps(cases: list[Case]) -> list[Case]:
    """Cases whose numbers Apple's MPS has; none where there is no such device."""
    has_mps = torch.backends.mps.is_available()
    return [case for case in cases if has_mps and torch.float64 != case.dtype and "float64" not in case.mask]


# The same kinds of calls, fewer of each: for gradients.
GRADIENT_TABLE = [
    c
    for c in TABLE
    if c.name.startswith(("grouped", "one ", "heads", "two", "matrices", "key and", "no ", "more"))
    or (c.name.startswith("longer") and ("causal" in c.name or "window" in c.name))
]
