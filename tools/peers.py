"""``pascal-attn bench`` with the attention of other projects among the candidates: ``python -m tools.peers``.

Needs pascal-attn and noflash-attention, which the extras ``bench`` and ``test`` install. Neither is imported before it
runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pascal_attn_core.call import Arguments
from pascal_attn_core.cli import main as pascal_attn
from pascal_attn_core.cli.bench import candidates
from pascal_attn_core.cli.bench.candidates import Attend, Candidate


def _pascal_attn() -> list[Candidate]:
    def candidate(tile: int) -> Candidate:
        def prepare(call: Arguments) -> Attend:
            from pascal_attn import tiled_attention

            mask = _additive_mask(call)
            return lambda q, k, v: tiled_attention(q, k, v, call.scale, mask, tile).transpose(1, 2)

        return Candidate(f"pascal-attn-{tile}", prepare)

    return [candidate(tile) for tile in (64, 128, 256)]


def _additive_mask(call: Arguments) -> Tensor | None:
    """pascal-attn documents one kind of mask: float, added, of full size. Made before the clock starts."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    allowed = call.attn_mask
    if call.is_causal:
        allowed = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=call.query.device).tril()
    if allowed is None:
        return None
    if allowed.dtype == torch.bool:
        allowed = torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -1e9)
    return allowed.expand(*allowed.shape[:-2], rows, keys)


def _noflash() -> list[Candidate]:
    def candidate(tier: int) -> Candidate:
        def prepare(call: Arguments) -> Attend:
            patch = _import_noflash()
            # The block sizes are those that its own dispatch picks for this shape.
            batch, heads, keys = call.query.shape[0], call.query.shape[1], call.key.shape[2]
            rows = patch._auto_block_m(batch, keys, heads, call.query.dtype, budget_factor=2 if tier == 1 else 1)
            sizes = {"block_m": rows}
            if tier == 2:
                sizes["block_n"] = patch._auto_block_n(batch, rows, heads, call.query.dtype)
            run = (patch.chunked_sdpa, patch.chunked_sdpa_online, patch.chunked_sdpa_inplace)[tier - 1]
            options = {"attn_mask": call.attn_mask, "is_causal": call.is_causal, **sizes}
            return lambda q, k, v: run(q, k, v, call.scale, **options)

        return Candidate(f"noflash-{tier}", prepare, extra_bytes=lambda call: 3 << 30)

    return [candidate(tier) for tier in (1, 2, 3)]


def _import_noflash() -> Any:
    """Importing noflash_attention replaces torch's function in the whole process: restore it at once."""
    original = F.scaled_dot_product_attention
    with contextlib.redirect_stdout(io.StringIO()):
        from noflash_attention import disable, patch

        disable()
    if F.scaled_dot_product_attention is not original:
        raise RuntimeError("noflash_attention left its own function in torch.nn.functional: exclude it from this run")
    return patch


def installed() -> list[Candidate]:
    """The peers that are installed; says which are not."""
    found: list[Candidate] = []
    for name, make in (("pascal_attn", _pascal_attn), ("noflash_attention", _noflash)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: not compared")
        else:
            found += make()
    return found


if __name__ == "__main__":
    candidates.MORE += installed()
    sys.exit(pascal_attn(["bench", *sys.argv[1:]]))
