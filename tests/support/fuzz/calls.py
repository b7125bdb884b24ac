"""Random attention calls: :func:`draw` makes one whole from a number, as plain data that can be printed and pasted,
and :func:`build` its tensors and their meaning, worked out without the package under test."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pascal_attn_core import AttentionConfig, LazyMask

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

Layout = Callable[[Tensor, torch.Generator], "tuple[Tensor, Tensor]"]


def _garbage(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what lies between the elements of a view: whoever reads it is found out."""
    return torch.full(shape, math.nan if dtype.is_floating_point else 1, dtype=dtype)


def _whole(view: Tensor) -> tuple[Tensor, Tensor]:
    return view, torch.as_strided(view, (view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)


def _permuted(order: Callable[[int], list[int]]) -> Layout:
    def make(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        dims = order(values.dim())
        back = [dims.index(d) for d in range(values.dim())]
        return _whole(values.permute(dims).contiguous().permute(back))

    return make


def _swapped(a: int, b: int) -> Layout:
    def order(dims: int) -> list[int]:
        swapped = list(range(dims))
        if min(a, b) >= -dims:
            swapped[a], swapped[b] = swapped[b], swapped[a]
        return swapped

    return _permuted(order)


def _strided_by(dim: int, step: int, first: int) -> Layout:
    """Every ``step``-th entry of a dimension of a larger tensor, from ``first`` on."""

    def make(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = list(values.shape)
        if -dim > len(shape):
            return _whole(values.contiguous())
        shape[dim] = shape[dim] * step + first
        wide = _garbage(shape, values.dtype)
        view = wide[(..., slice(first, None, step), *[slice(None)] * (-dim - 1))]
        view.copy_(values)
        return _whole(view)

    return make


def _sliced(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Part of wider rows, as a fused projection gives it."""
    wide = _garbage((*values.shape[:-1], values.shape[-1] + 3), values.dtype)
    wide[..., 1:-2] = values
    return _whole(wide[..., 1:-2])


def _offset(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Seven elements into its memory, so that no row is aligned."""
    flat = _garbage((values.numel() + 7,), values.dtype)
    flat[7:] = values.flatten()
    return _whole(flat[7:].view(values.shape))


def _reaching_back(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A view made from a later view, whose memory begins before that one's."""
    flat = _garbage((values.numel() + 9,), values.dtype)
    flat[2 : 2 + values.numel()] = values.flatten()
    return _whole(flat[8:].as_strided(values.shape, values.contiguous().stride(), 2))


def _repeated(*dims: int) -> Layout:
    """Stride 0 in these dimensions."""

    def make(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        part = values
        for dim in dims:
            if -dim <= values.dim() and values.shape[dim]:
                part = part.narrow(dim, 0, 1)
        return _whole(part.contiguous().expand(values.shape))

    return make


def _overlapping(dim: int, share: float) -> Layout:
    """Neighbours in a dimension share elements: their distance is a share of their length, at least 1."""

    def make(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if -dim > values.dim() or not values.numel():
            return _whole(values.contiguous())
        strides, extent = [0] * values.dim(), 1
        for d in reversed(range(values.dim())):
            strides[d] = max(1, int(extent * share)) if d - values.dim() == dim else extent
            extent = (values.shape[d] - 1) * strides[d] + extent
        flat = torch.randn(extent, generator=generator, dtype=torch.float64).to(values.dtype)
        return _whole(flat.as_strided(values.shape, strides))

    return make


def _negated(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    memory = (-values).contiguous()
    return torch._neg_view(memory), memory


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda values, generator: _whole(values.contiguous()),
    "heads in tokens": _swapped(-3, -2),
    "columns first": _swapped(-2, -1),
    "heads outside the batch": _swapped(-4, -3),
    "reversed": _permuted(lambda dims: list(reversed(range(dims)))),
    "sliced": _sliced,
    "every second token": _strided_by(-2, 2, 0),
    "every second column": _strided_by(-1, 2, 1),
    "every third head": _strided_by(-3, 3, 2),
    "offset": _offset,
    "reaching back": _reaching_back,
    "stride 0 batch": _repeated(-4),
    "stride 0 heads": _repeated(-3),
    "stride 0 tokens": _repeated(-2),
    "stride 0 columns": _repeated(-1),
    "stride 0 everywhere": _repeated(-1, -2, -3, -4),
    "rows one apart": _overlapping(-2, 0.0),
    "heads one apart": _overlapping(-3, 0.0),
    "batch one apart": _overlapping(-4, 0.0),
    "overlapping rows": _overlapping(-2, 0.5),
    "overlapping heads": _overlapping(-3, 0.4),
    "overlapping batch": _overlapping(-4, 0.6),
    "negated": _negated,
}
OVERLAPPING = tuple(name for name in LAYOUTS if name.startswith(("stride 0", "overlapping")) or "one apart" in name)
MASK_LAYOUTS = ("contiguous", "columns first", "reversed", "sliced", "every second token", "every second column",
                "offset", "reaching back", "expanded")  # fmt: skip


def _steps(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where((i + 2 * j + b) % 4 == 0, -math.inf, 0.1 * (j % 7) - 0.2 * h)


RULES: dict[str, Callable[..., Any]] = {
    "bool rule of blocks": lambda b, h, i, j: (i // 5) == (j // 5),
    "bool rule of all": lambda b, h, i, j: (i * 7 + j * 3 + b + h) % 5 != 0,
    "bool rule of keys": lambda b, h, i, j: j % 3 != 1,
    "bool rule of nothing": lambda b, h, i, j: (i < 0) & (j < 0),
    "float rule of distance": lambda b, h, i, j: -0.05 * (h + 1) * (i - j).abs(),
    "float rule of keys": lambda b, h, i, j: (j % 5).float(),
    "float rule with -inf": _steps,
    "float rule in float64": lambda b, h, i, j: (i - j).double().cos(),
    "float rule in float16": lambda b, h, i, j: ((i + j + b) % 9).half() / 4,
}


class _Short:
    """Printed without the fields that have their default, so that it can be pasted."""

    def __repr__(self) -> str:
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        given = [f"{name}={value!r}" for name, (value, default) in values.items() if value not in (default, {})]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Mask(_Short):
    """``keep``: which of "bhls" it has at full length. ``cut``: leading dimensions of length 1 are left out."""

    kind: str
    keep: str = "bhls"
    cut: bool = False
    dtype: str = "bool"
    layout: str = "contiguous"
    odd_bytes: bool = False
    declared: bool = True


@dataclass(frozen=True, repr=False)
class Call(_Short):
    """One call as plain data; ``number`` decides its numbers."""

    number: int
    dtype: str = "float32"
    batch: tuple[int, ...] = (1,)
    heads: tuple[int, int, int] = (1, 1, 1)
    enable_gqa: bool = False
    matrices: bool = False
    leads: tuple[str, str, str] = ("full", "full", "full")
    rows: int = 5
    keys: int = 7
    width: int = 8
    width_v: int = 8
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    magnitude: float = 1.0
    mask: Mask | None = None
    is_causal: bool = False
    alignment: str = "upper_left"
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: str | None = None
    dropout_p: float = 0.0
    poison: str = ""
    wants: str = ""
    through: str = "out"
    grad_layout: str = "contiguous"
    entry: str = "sdpa"
    explained: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def num_heads(self) -> int:
        return max(self.heads)

    @property
    def mask_kind(self) -> str:
        return "none" if self.mask is None else self.mask.kind

    @property
    def is_empty(self) -> bool:
        return 0 in (*self.batch, *self.heads, self.rows, self.keys, self.width_v)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of query, key and value."""
        shapes = []
        sizes = ((self.rows, self.width), (self.keys, self.width), (self.keys, self.width_v))
        for heads, lead, size in zip(self.heads, self.leads, sizes):
            full = {"full": self.batch, "ones": (1,) * len(self.batch), "short": self.batch[1:]}[lead]
            shapes.append(size if self.matrices else (*full, heads, *size))
        return tuple(shapes)


_LENGTHS = (0, 1, 1, 2, 3, 5, 7, 11, 13, 16, 17, 31, 32, 33, 37, 48, 61, 63, 64, 65, 97, 127, 128, 129, 151, 200, 257)
_WIDTHS = (0, 1, 2, 3, 5, 8, 8, 8, 16, 16, 17, 24, 32, 40, 63, 64, 64, 65, 80, 96, 128, 160, 255, 256, 257, 512, 513)
_BATCHES = ((), (1,), (2,), (2,), (3,), (0,), (2, 1), (2, 2), (1, 3), (2, 1, 2))
BOOL_KINDS = ("bool", "bool some rows empty", "bool padding", "bool left padding", "bool nothing", "bool everything",
              "bool blocks")  # fmt: skip
FLOAT_KINDS = ("float", "float large", "-inf padding", "-1e9 padding", "finfo padding", "-1e4 padding",
               "-inf some rows", "-1e9 some rows", "finfo some rows", "-1e4 some rows", "-inf everywhere",
               "finfo everywhere", "-1e9 causal", "finfo causal")  # fmt: skip
ROUTES = ("auto", "auto", "auto", "auto, no math limit", "auto, no math limit", "torch", "tiled", "tiled", "online",
          "tiny tiles", "tiny tiles", "small budget", "math")  # fmt: skip
MOST_SCORES, MOST_NUMBERS, MOST_TILES = 30_000, 150_000, 100


def draw(number: int) -> Call:
    """The call of this number."""
    r = random.Random(number)
    dtype = r.choice(("float32", "float32", "float32", "float16", "bfloat16", "float64"))
    batch = r.choice(_BATCHES) if r.random() < 0.6 else (r.choice((1, 2)),)
    heads, enable_gqa = _draw_heads(r)
    matrices = r.random() < 0.05
    if matrices:
        batch, heads, enable_gqa = (), (1, 1, 1), r.random() < 0.2
    rows, keys, width, width_v = _draw_sizes(r, math.prod(batch) * max(heads))
    call = Call(
        *(number, dtype, batch, heads, enable_gqa, matrices, _draw_leads(r, batch), rows, keys, width, width_v),
        layouts=_draw_layouts(r),
        magnitude=r.choice((1.0, 1.0, 1.0, 1.0, 0.0, 0.1, 5.0, 20.0, 1e2, 1e4)),
        is_causal=r.random() < 0.3,
        alignment="lower_right" if r.random() < 0.2 else "upper_left",
        window=_draw_window(r) if r.random() < 0.15 else None,
        scale=r.choice((0.0, 1.0, -0.3, 2.5, 30.0, 1e-4)) if r.random() < 0.25 else None,
        softcap=r.choice((0.5, 2.0, 50.0)) if r.random() < 0.12 else None,
        sinks=r.choice(("normal", "normal", "some -inf", "all -inf", "large", "float64", "strided"))
        if r.random() < 0.15
        else None,
        dropout_p=1.0 if r.random() < 0.03 else 0.0,
        entry=r.choice(("sdpa", "sdpa", "sdpa", "lse", "switch", "switch held by name")),
        explained=r.random() < 0.15,
        config=_draw_config(r, math.prod(batch) * max(heads), rows, keys),
    )
    if r.random() < 0.55:
        call = replace(call, mask=_draw_mask(r, call))
    if call.mask is not None and call.mask.kind.endswith(("padding", "of keys", "nothing")) and r.random() < 0.4:
        call = replace(call, poison=r.choice(("nan in key", "nan in value", "inf in key", "inf in value")))
    if r.random() < 0.55:
        some = [name for name in "qkvms" if r.random() < 0.6]
        call = replace(
            call,
            wants="".join(some),
            through=r.choice(("out", "out", "lse", "both")) if call.entry == "lse" else "out",
            grad_layout=r.choice(("contiguous", "stride 0 everywhere", "columns first", "heads in tokens", "negated")),
        )
    return possible(call)


def possible(call: Call) -> Call:
    """The call without what its entry does not have, or what cannot be together."""
    if call.entry.startswith("switch"):
        mask = None if call.is_causal or call.mask_kind in RULES else call.mask
        call = replace(call, mask=mask, alignment="upper_left", window=None, softcap=None, sinks=None)
    if call.matrices:
        call = replace(call, batch=(), heads=(1, 1, 1))
    if not call.wants:
        call = replace(call, grad_layout="contiguous")
    if call.entry != "lse" or not call.wants:
        call = replace(call, through="out")
    if call.mask is None or call.matrices or any(name in OVERLAPPING for name in call.layouts[1:]):
        call = replace(call, poison="")
    if call.mask_kind in RULES and (call.matrices or not call.batch):
        call = replace(call, mask=None, poison="")
    kept = {"m": call.mask_kind in FLOAT_KINDS, "s": call.sinks is not None}
    return replace(call, wants="".join(name for name in call.wants if kept.get(name, True)))


def _draw_heads(r: random.Random) -> tuple[tuple[int, int, int], bool]:
    some, groups = r.choice((1, 1, 2, 3)), r.choice((2, 2, 3, 4))
    many = max(2, some)
    return r.choice((
        ((some, some, some), False), ((some, some, some), False), ((some, some, some), True),
        ((some * groups, some, some), True), ((some * groups, some, some), True),
        ((many, 1, 1), False), ((1, many, many), False), ((many, many, 1), False),
        ((0, 0, 0), False) if r.random() < 0.1 else ((1, 1, 1), False),
    ))  # fmt: skip


def _draw_sizes(r: random.Random, units: int) -> tuple[int, int, int, int]:
    if r.random() < 0.02 and units == 1:  # where tiles are preferred, and beyond the limit of short calls
        return r.choice((1024, 1040)), r.choice((77, 128, 1024, 1031)), r.choice((8, 16)), 8
    length = lambda: r.choice(_LENGTHS) if r.random() < 0.8 else r.randrange(300)  # noqa: E731
    rows, keys, width = length(), length(), r.choice(_WIDTHS)
    width_v = width if r.random() < 0.5 else r.choice(_WIDTHS)
    while units * rows * keys > MOST_SCORES:
        rows, keys = (rows // 2, keys) if r.random() < 0.5 else (rows, keys // 2)
    while units * (rows + keys) * max(width, width_v) > MOST_NUMBERS:
        width, width_v = width // 2, width_v // 2
    return rows, keys, width, width_v


def _draw_leads(r: random.Random, batch: tuple[int, ...]) -> tuple[str, str, str]:
    leads = ["full", "full", "full"]
    if batch and r.random() < 0.2:
        leads = [r.choice(("full", "ones", "short")) for _ in leads]
        leads[r.randrange(3)] = "full"
    return leads[0], leads[1], leads[2]


def _draw_layouts(r: random.Random) -> tuple[str, str, str]:
    kind = r.random()
    if kind < 0.4:
        return ("contiguous",) * 3
    if kind < 0.6:
        return (r.choice(list(LAYOUTS)),) * 3
    return tuple(r.choice(list(LAYOUTS)) if r.random() < 0.6 else "contiguous" for _ in range(3))  # type: ignore


def _draw_window(r: random.Random) -> tuple[int, int]:
    side = lambda: r.choice((-1, 0, 1, 3, 16, 70))  # noqa: E731
    return side(), side()


def _draw_mask(r: random.Random, call: Call) -> Mask:
    keep = r.choice(("bhls", "bhls", "bls", "ls", "ls", "s", "bs", "bs", "hs", "hls", "l", ""))
    layout = r.choice(MASK_LAYOUTS) if r.random() < 0.4 else "contiguous"
    share, cut = r.random(), r.random() < 0.4
    if share < 0.4:
        return Mask(r.choice(BOOL_KINDS), keep, cut, "bool", layout, odd_bytes=r.random() < 0.2)
    if share < 0.85:
        dtype = call.dtype if r.random() < 0.6 else r.choice(list(DTYPES))
        dtype = "float32" if dtype == "float64" and call.dtype != "float64" and r.random() < 0.5 else dtype
        return Mask(r.choice(FLOAT_KINDS), keep, cut, dtype, layout)
    kind = r.choice(list(RULES))
    dtype = "bool" if kind.startswith("bool") else "float32"
    dtype = {"float rule in float64": "float64", "float rule in float16": "float16"}.get(kind, dtype)
    return Mask(kind, keep, cut, dtype, declared=r.random() < 0.6)


def _draw_config(r: random.Random, units: int, rows: int, keys: int) -> dict[str, Any]:
    name = r.choice(ROUTES)
    if name == "tiny tiles":
        blocks = {"q_block": r.choice((1, 2, 5, 16, 33, 64)), "kv_block": r.choice((1, 3, 7, 16, 33, 64))}
        while units * (1 + rows // blocks["q_block"]) * (1 + keys // blocks["kv_block"]) > MOST_TILES:
            blocks = {side: 2 * tokens + 1 for side, tokens in blocks.items()}
        return {"route": "tiled", **blocks, "softmax": r.choice(("auto", "online")), "trim_masks": r.random() < 0.5}
    return {
        "auto": {},
        "auto, no math limit": {"math_limit_mib": 0},
        "torch": {"route": "torch"},
        "tiled": {"route": "tiled"},
        "online": {"route": "tiled", "softmax": "online"},
        "small budget": {"route": "tiled", "budget_mib": 0.25},
        "math": {"route": "math", "math_limit_mib": 1 << 20},
    }[name]


class Built(NamedTuple):
    """A call's arguments; ``memory`` is what each of them lies in; the rest is their meaning in float64."""

    tensors: list[Tensor]
    mask: Tensor | LazyMask | None
    sinks: Tensor | None
    options: dict[str, Any]
    config: AttentionConfig
    memory: list[Tensor]
    allowed: Tensor  # bool [*B, H, L, S]
    bias: Tensor | None  # of the same shape, rounded to the dtype of the sums, finite
    clean: tuple[Tensor, Tensor, Tensor]  # [*B, H, ...] without what is at places that nobody looks at
    poisoned: Tensor  # bool [*B, H]: heads whose keys or values hold such numbers


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what the package promises to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def build(call: Call) -> Built:
    """The call's arguments, always with the same numbers."""
    generator = torch.Generator().manual_seed(call.number % (1 << 62))
    tensors, memory = [], []
    for shape, layout, size in zip(call.shapes(), call.layouts, (call.magnitude, 1.0, 1.0)):
        values = (torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(call.torch_dtype)
        tensor, whole = LAYOUTS[layout](values, generator)
        tensors.append(tensor)
        memory.append(whole)
    lead, heads = call.batch, call.num_heads
    full = (*lead, heads, call.rows, call.keys)
    mask, dense = None, None
    if call.mask is not None:
        mask, dense, whole = _build_mask(call, call.mask, full, generator)
        memory += whole
    allowed, bias = _band(call).expand(full), None
    if dense is not None and dense.dtype == torch.bool:
        allowed = allowed & dense.expand(full)
    elif dense is not None:
        sums = sums_dtype(call.torch_dtype)
        bias = dense.to(sums).double().expand(full)
        allowed = allowed & (bias != -math.inf)
        bias = bias.masked_fill(bias == -math.inf, 0.0)
    poisoned = torch.zeros((*lead, heads), dtype=torch.bool)
    clean = [t.clone() for t in tensors]
    if call.poison:
        poisoned = _poison(call, tensors, clean, allowed)
    sinks = _build_sinks(call, generator)
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": call.enable_gqa}
    if not call.entry.startswith("switch"):
        options |= {"alignment": call.alignment, "window": call.window, "softcap": call.softcap}
    options["dropout_p"], config = call.dropout_p, AttentionConfig(**call.config)
    memory += [] if sinks is None else [_whole(sinks)[1]]
    wide = tuple(_expanded(t.double(), call, which) for which, t in enumerate(clean))
    return Built(tensors, mask, sinks, options, config, memory, allowed, bias, wide, poisoned)


def _expanded(tensor: Tensor, call: Call, which: int) -> Tensor:
    """``[*B, H, tokens, width]``."""
    tensor = tensor[(None,) * max(0, 3 - tensor.dim())]
    if call.enable_gqa and which and tensor.shape[-3]:
        tensor = tensor.repeat_interleave(call.num_heads // tensor.shape[-3], dim=-3)
    return tensor.expand(*call.batch, call.num_heads, *tensor.shape[-2:])


def _band(call: Call) -> Tensor:
    """Bool ``[L, S]``: what is_causal and the window leave."""
    offset = call.keys - call.rows if call.alignment == "lower_right" else 0
    i, j = torch.arange(call.rows)[:, None] + offset, torch.arange(call.keys)[None, :]
    allowed = torch.ones(call.rows, call.keys, dtype=torch.bool)
    if call.is_causal:
        allowed &= j <= i
    left, right = call.window or (-1, -1)
    if left >= 0:
        allowed &= j >= i - left
    if right >= 0:
        allowed &= j <= i + right
    return allowed


def _build_mask(call: Call, mask: Mask, full: tuple[int, ...], generator: torch.Generator):
    """(the argument, dense: bool or float tensor that broadcasts to ``full``, the memory it lies in)"""
    names = "b" * (len(full) - 3) + "hls"
    shape = [n if name in mask.keep else 1 for name, n in zip(names, full)]
    if mask.kind in RULES:
        four, rule = shape[-4:], RULES[mask.kind]
        declared = {"dtype": torch.bool if mask.dtype == "bool" else DTYPES[mask.dtype]} if mask.declared else {}
        lazy = LazyMask(four, rule, device="cpu", **declared)
        indices = [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(four)]
        return lazy, rule(*indices).expand(four), []
    if mask.cut or call.matrices:
        while len(shape) > (2 if call.matrices else 1) and shape[0] == 1:
            shape = shape[1:]
        shape = shape[1:] if call.matrices and len(shape) > 2 else shape
    values = _mask_values(mask, shape, generator)
    if mask.layout == "expanded":
        tensor, whole = _whole(values.contiguous().expand(full[1:] if call.matrices else full))
    else:
        tensor, whole = LAYOUTS[mask.layout](values, generator) if len(shape) > 1 else _whole(values)
    if mask.odd_bytes and tensor.dtype == torch.bool:
        bytes_of = torch.tensor([2, 128, 255, 1], dtype=torch.uint8)
        drawn = bytes_of[torch.randint(4, whole.shape, generator=generator)]
        whole.view(torch.uint8).mul_(drawn)
        assert torch.equal(tensor.view(torch.uint8) != 0, values.expand(tensor.shape))
    dense = (tensor.view(torch.uint8) != 0) if tensor.dtype == torch.bool else tensor
    return tensor, dense, [whole]


def _mask_values(mask: Mask, shape: list[int], generator: torch.Generator) -> Tensor:
    if mask.kind in BOOL_KINDS:
        return _allowed(mask.kind.removeprefix("bool").strip(), shape, generator)
    dtype = DTYPES[mask.dtype]
    if mask.kind in ("float", "float large"):
        size = 2.0 if mask.kind == "float" else 100.0
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype)
    word, _, kind = mask.kind.partition(" ")
    low = torch.finfo(dtype).min if word == "finfo" else float(word)
    allowed = _allowed({"everywhere": "nothing", "some rows": "some rows empty"}.get(kind, kind), shape, generator)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = noise if torch.rand(1, generator=generator) < 0.3 else torch.zeros(shape, dtype=torch.float64)
    return values.masked_fill(~allowed, low).to(dtype)


def _allowed(kind: str, shape: list[int], generator: torch.Generator) -> Tensor:
    keys = shape[-1]
    if kind in ("nothing", "everything"):
        return torch.full(shape, kind == "everything")
    if kind in ("padding", "left padding"):
        kept = torch.randint(0, keys + 1, (*shape[:-1], 1), generator=generator)
        kept = kept[..., :1, :].expand(*shape[:-1], 1) if len(shape) > 1 else kept  # the same for all rows
        allowed = torch.arange(keys) < kept
        return allowed.flip(-1) if kind == "left padding" else allowed
    if kind == "causal":
        return torch.ones(shape, dtype=torch.bool).tril_() if len(shape) > 1 else torch.ones(shape, dtype=torch.bool)
    allowed = torch.rand(shape, generator=generator) < 0.7
    if kind == "some rows empty" and len(shape) > 1:
        allowed[..., ::3, :] = False
    if kind == "blocks" and len(shape) > 1:
        allowed[..., : shape[-2] // 2, : keys // 2] = True
        allowed[..., shape[-2] // 2 :, : keys // 3] = False
    return allowed


def _poison(call: Call, tensors: list[Tensor], clean: list[Tensor], allowed: Tensor) -> Tensor:
    """Put NaN or inf where no query looks, and say in which heads."""
    which = 1 if call.poison.endswith("key") else 2
    tensor = tensors[which]
    seen = allowed.any(-2)  # [*B, H, S]
    groups = call.num_heads // tensor.shape[-3] if call.enable_gqa and tensor.shape[-3] else 1
    if groups > 1:
        seen = seen.unflatten(-2, (-1, groups)).any(-2)
    unseen = (seen.long().sum_to_size(tensor.shape[:-1]) == 0) if tensor.numel() else seen.new_zeros(tensor.shape[:-1])
    bad = float("nan") if call.poison.startswith("nan") else math.inf
    tensor.masked_fill_(unseen[..., None], bad)
    clean[which] = tensor.clone().masked_fill_(unseen[..., None], 0.0)
    wide = _expanded(unseen[..., None], call, which)[..., 0]
    return wide.any(-1)


def _build_sinks(call: Call, generator: torch.Generator) -> Tensor | None:
    if call.sinks is None:
        return None
    values = torch.randn(call.num_heads, generator=generator, dtype=torch.float64)
    if call.sinks == "all -inf":
        values.fill_(-math.inf)
    elif call.sinks == "some -inf":
        values[::2] = -math.inf
    elif call.sinks == "large":
        values *= 40
    if call.sinks == "strided":
        return values.to(call.torch_dtype).repeat_interleave(2)[::2]
    return values.to(torch.float64 if call.sinks == "float64" else call.torch_dtype)
