"""Pictures of attention: a heat map of chosen rows, the tiles that a causal rule, a window or a mask leaves, and what
the online softmax of a row knows after each block of keys.

    attention_map(query, key, rows=[0, 17, -1], is_causal=True).plot("rows.png")
    plot_tiles(1024, 1024, is_causal=True, path="tiles.png")
    plot_softmax(query[0, 0, 17] @ key[0, 0].mT * 64**-0.5, path="softmax.png")

Needs matplotlib. A picture is also returned, as a ``matplotlib.figure.Figure``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .call import check_call
from .tiled.masks import Band

__all__ = ["plot_rows", "plot_softmax", "plot_tiles", "softmax_states", "tile_states"]

_COLOURS = ("#aab3bd66", "#2a7f62", "#d9a441")
_INK = "#737b85"  # of text and lines: it can be read on white and on the black of dark pages, which show through
_MOST_COLUMNS = 600  # of a heat map: a pixel at least for each, at matplotlib's default size
_WORDS = ("skipped", "computed", "partly masked")


@contextmanager
def on_any_page() -> Iterator[None]:
    """Figures made within have no background, and words and lines that can be read on white and on black."""
    from matplotlib import rc_context

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours: dict[Any, str] = dict.fromkeys(inked, _INK)
    with rc_context(colours | dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")):
        yield


@on_any_page()
def plot_rows(weights: Tensor, path: str | Path | None = None, *, rows: Sequence[int] | None = None) -> Any:
    """A heat map of softmax rows, one panel for each head (at most 8) of the first batch element. If there are more
    keys than columns, a column has the maximum of its keys, so that no key with a large weight is lost. Colours follow
    the square root of the probability, so that small weights can be seen.

    Args:
        weights: ``[..., heads, rows, keys]``, as :func:`pascal_attn_core.attention_map` returns them.
        path: file to which the picture is also written; None = not written.
        rows: the query indices, for the axis; None = 0, 1, 2 ...
    Raises:
        ValueError: weights has fewer than two dimensions, or rows is not one number for each row.
        ImportError: matplotlib is missing.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    if weights.dim() < 2:
        raise ValueError(f"weights must be [..., heads, rows, keys], got {list(weights.shape)}")
    panels = weights.detach().float().cpu()
    while panels.dim() > 3:
        panels = panels[0]
    panels = panels.reshape(-1, *panels.shape[-2:])[:8]
    labels = list(range(panels.shape[1])) if rows is None else list(rows)
    if len(labels) != panels.shape[1]:
        raise ValueError(f"rows must hold {panels.shape[1]} numbers, one for each row, got {len(labels)}")
    figure = Figure(figsize=(8, 0.8 + len(panels) * max(1.1, min(4.0, 0.22 * len(labels)))), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    columns, per_column = _columns(panels)
    norm = PowerNorm(0.5, vmin=0.0, vmax=float(columns.max()) if columns.numel() else 1.0)
    extent = (-0.5, columns.shape[-1] * per_column - 0.5, len(labels) - 0.5, -0.5)
    for head, (axis, panel) in enumerate(zip(axes, columns)):
        image = axis.imshow(panel.numpy(), aspect="auto", interpolation="nearest", norm=norm, extent=extent)
        axis.spines[:].set_visible(False)  # they would cover the first and the last keys
        axis.set_ylabel(f"head {head}\nquery")
        step = max(1, len(labels) // 12)
        axis.set_yticks(range(0, len(labels), step), [str(label) for label in labels[::step]])
    if len(panels):
        axes[-1].set_xlabel("key" if per_column == 1 else f"key (each column: the maximum of {per_column})")
        figure.colorbar(image, ax=list(axes), label="probability")
    return _written(figure, path)


def _columns(panels: Tensor) -> tuple[Tensor, int]:
    """``[heads, rows, keys]`` as at most 600 columns, each the maximum of as many neighbouring keys; their number."""
    keys = panels.shape[-1]
    per_column = max(1, -(-keys // _MOST_COLUMNS))
    padded = torch.nn.functional.pad(panels, (0, -keys % per_column))
    return padded.unflatten(-1, (-1, per_column)).amax(dim=-1), per_column


def tile_states(
    seq_len_q: int,
    seq_len_kv: int,
    *,
    attn_mask: Tensor | None = None,
    q_block: int = 128,
    kv_block: int = 128,
    **rule: Any,
) -> Tensor:
    """The state of each tile: ``[tiles of queries, tiles of keys]``, 0 = skipped, 1 = computed, 2 = computed and
    partly masked.

    Args:
        attn_mask: bool ``[L, S]`` (True = takes part), or what broadcasts to it; a float mask forbids where it is -inf.
        rule: ``is_causal``, ``alignment`` and ``window`` as in :func:`pascal_attn_core.sdpa`.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments.
    """
    band = checked_band(seq_len_q, seq_len_kv, attn_mask, q_block, kv_block, **rule)
    allowed = torch.ones((), dtype=torch.bool) if attn_mask is None else attn_mask
    allowed = allowed if allowed.dtype == torch.bool else allowed != -torch.inf
    allowed = allowed.expand(seq_len_q, seq_len_kv)
    states = torch.zeros(-(-seq_len_q // q_block), -(-seq_len_kv // kv_block), dtype=torch.int8)
    for i, q0 in enumerate(range(0, seq_len_q, q_block)):
        q1 = min(q0 + q_block, seq_len_q)
        first, last = band.key_range(q0, q1, seq_len_kv)
        for j, j0 in enumerate(range(0, seq_len_kv, kv_block)):
            j1 = min(j0 + kv_block, seq_len_kv)
            tile = allowed[q0:q1, j0:j1]
            if first < j1 and j0 < last and tile.any():
                is_whole = band.diagonals(q0, q1, j0, j1) == (None, None) and tile.all()
                states[i, j] = 1 if is_whole else 2
    return states


def checked_band(
    seq_len_q: int, seq_len_kv: int, attn_mask: Tensor | None, q_block: int, kv_block: int, **rule: Any
) -> Band:
    """The band of a rule for tiles of these sizes; raises TypeError, ValueError."""
    for name, size in (("q_block", q_block), ("kv_block", kv_block)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    query, key = torch.empty(seq_len_q, 0), torch.empty(seq_len_kv, 0)
    return Band.of(check_call(query, key, key, attn_mask, **rule))


@on_any_page()
def plot_tiles(seq_len_q: int, seq_len_kv: int, *, path: str | Path | None = None, **rule: Any) -> Any:
    """A picture of :func:`tile_states`, whose other arguments ``rule`` are, with the share of tiles in words.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch as Swatch

    states = tile_states(seq_len_q, seq_len_kv, **rule)
    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    axis = figure.subplots()
    keys, queries = _edges(seq_len_kv, rule.get("kv_block", 128)), _edges(seq_len_q, rule.get("q_block", 128))
    colours: dict[str, Any] = {"cmap": ListedColormap(_COLOURS), "vmin": 0, "vmax": 2}
    axis.pcolormesh(keys, queries, states.numpy(), edgecolors="white", linewidth=0.5, **colours)
    axis.invert_yaxis()
    counts = [int((states == state).sum()) for state in range(3)]
    labels = [f"{word}: {count}" for word, count in zip(_WORDS, counts)]
    swatches = [Swatch(facecolor=colour, edgecolor="#98a2ad", label=label) for colour, label in zip(_COLOURS, labels)]
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 3, "columnspacing": 1.2}
    axis.legend(handles=swatches, frameon=False, **below)
    computed = 1 - counts[0] / max(1, states.numel())
    axis.set_title(f"{computed:.0%} of the tiles are computed")
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    return _written(figure, path)


def softmax_states(scores: Tensor, *, kv_block: int = 128) -> Tensor:
    """The statistics of an online softmax after each block of a row's keys: ``[blocks, 2]`` float64, the running
    maximum m, and the running sum of exp(score - m). A block with a larger maximum rescales the sum before it:
    FlashAttention-2, Algorithm 1, line 9.

    Args:
        scores: ``[S]``, the row's scaled and masked scores; -inf = masked.
    Raises:
        TypeError, ValueError: scores is no float tensor of one dimension, or kv_block is below 1.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores must be a float tensor, got {getattr(scores, 'dtype', type(scores).__name__)}")
    if scores.dim() != 1:
        raise ValueError(f"scores must be those of one row, [S], got {list(scores.shape)}")
    if kv_block < 1:
        raise ValueError(f"kv_block must be at least 1, got {kv_block}")
    highest, total, states = torch.tensor(-torch.inf, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64), []
    for block in scores.detach().double().cpu().split(kv_block) if len(scores) else ():
        before, highest = highest, torch.maximum(highest, block.max())
        if highest > -torch.inf:
            total = total * (before - highest).exp() + (block - highest).exp().sum()
        states.append(torch.stack((highest, total)))
    return torch.stack(states) if states else torch.empty(0, 2, dtype=torch.float64)


@on_any_page()
def plot_softmax(scores: Tensor, path: str | Path | None = None, *, kv_block: int = 128) -> Any:
    """A picture of :func:`softmax_states` (same arguments), beside the maximum and the sum of the whole row.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    states = softmax_states(scores, kv_block=kv_block)
    figure = Figure(figsize=(7, 5.4), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    ends = [min((block + 1) * kv_block, len(scores)) for block in range(len(states))]
    for axis, values, name in zip(axes, states.T, ("running maximum m", "running sum of exp(score - m)")):
        if len(values):
            axis.axhline(float(values[-1]), color=_COLOURS[2], linestyle="--", label="of the whole row")
        axis.plot(ends, values.numpy(), marker="o", markersize=4, color=_COLOURS[1], label="after this block")
        axis.set_ylabel(name)
        axis.legend(frameon=False)
    axes[-1].set_xlabel("keys seen")
    return _written(figure, path)


def _edges(tokens: int, block: int) -> list[int]:
    return [*range(0, tokens, block), tokens]


def _written(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
