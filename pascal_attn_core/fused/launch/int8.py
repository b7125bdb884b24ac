"""The launches of the int8 mode: quantize Q and K, then the forward kernel on words of four 8-bit integers.

With q' = q + dq and k' = k + dk the rounded rows (|dq| <= max|q| / 254 for every element, K after its mean key has
been subtracted), a score errs by at most scale * (|q|_1 max|dk| + |k|_1 max|dq| + D max|dq| max|dk|) = e, and an
output by at most (exp(2 e) - 1) * max|v|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import AttentionCall
from ..code.params import Forward, Quantize
from . import Launch
from .fields import common_fields, result_fields, steps, views, work_of
from .plan import Plan

_WORDS = 16  # words of a chunk: rows are padded to a multiple of 64 elements


def int8_launches(call: AttentionCall, plan: Plan, out: Tensor) -> list[Launch]:
    """The launches that write out ``[*batch, Hq, L, Dv]``. Extra memory: Q and K in 8 bits, and a scale per row."""
    variant, geometry = plan.forward, plan.forward.geometry
    row_words = -(-call.head_dim // (4 * _WORDS)) * _WORDS
    launches = []
    for view in views(call, out):
        batches, (out_view,) = view.query.shape[0], view.rest
        mean_key = view.key.mean(dim=-2, dtype=torch.float32)
        fields = common_fields(call, view) | result_fields(out_view, "o", "o")
        keep: list[Tensor] = [mean_key, *view.tensors]
        for name, tensor, mean in (("q", view.query, None), ("k", view.key, mean_key)):
            words = tensor.new_empty((*tensor.shape[:-1], row_words), dtype=torch.int32)
            row_scales = tensor.new_empty(tensor.shape[:-1], dtype=torch.float32)
            batch, head, token, _ = steps(tensor)
            params = Quantize(
                x=tensor.data_ptr(),
                mean=0 if mean is None else mean.data_ptr(),
                words=words.data_ptr(),
                scales=row_scales.data_ptr(),
                rows=tensor.shape[2],
                heads=tensor.shape[1],
                batches=batches,
                dim=call.head_dim,
                row_words=row_words,
                xb=batch,
                xh=head,
                xs=token,
            )
            fields |= {f"{name}_words": words.data_ptr(), f"{name}_scales": row_scales.data_ptr()}
            keep += [words, row_scales]
            grid = (-(-row_scales.numel() // 4), 1, 1)
            launches.append(Launch(variant, "pa_quantize", grid, 128, params, tuple(keep)))
        grid = (-(-call.seq_len_q // geometry.rows), call.num_heads, batches)
        params_ = Forward(**fields, row_words=row_words)
        launches.append(
            Launch(variant, "pa_forward_int8", grid, geometry.threads, params_, tuple(keep), work_of(call, view))
        )
    return launches
