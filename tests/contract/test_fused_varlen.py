"""Sequences of different lengths in one launch, packed one behind the other, in the emulation."""

from __future__ import annotations

import pytest
import torch
from attn_support.fused_cases import WHOLE, poisoned
from attn_support.fused_emulation import GXX, emulate

from pascal_attn_core.call import check_call
from pascal_attn_core.fused._plan import forward_launches
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_do_not_see_each_other(is_causal: bool, alignment: str) -> None:
    q_lengths, k_lengths = [5, 130, 1, 77], [9, 200, 1, 64]
    q_first, k_first = (torch.tensor([0, *n]).cumsum(0).int() for n in (q_lengths, k_lengths))
    query = torch.randn(sum(q_lengths), 4, 64)
    key, value = (torch.randn(sum(k_lengths), 2, 64) for _ in range(2))
    out, lse = poisoned(tuple(query.shape), torch.float32), poisoned((4, sum(q_lengths)), torch.float32)
    as_heads = [t.transpose(0, 1)[None] for t in (query, key, value, out)]
    call = check_call(*as_heads[:3], is_causal=is_causal, enable_gqa=True)
    (launch,) = forward_launches(call, as_heads[3], lse[None], None, WHOLE)
    params = launch.params
    params.cu_q, params.cu_k, params.lower_right = q_first.data_ptr(), k_first.data_ptr(), alignment == "lower_right"
    params.lq, params.lk = max(q_lengths), max(k_lengths)
    tiles = -(-max(q_lengths) // launch.variant.geometry.rows)
    emulate([launch._replace(grid=(tiles, 4, len(q_lengths)))])
    for i, (q0, k0) in enumerate(zip(q_first[:-1], k_first[:-1])):
        rows, keys = slice(q0, q_first[i + 1]), slice(k0, k_first[i + 1])
        part = [t[s].transpose(0, 1).double() for t, s in ((query, rows), (key, keys), (value, keys))]
        expected, expected_lse = reference_sdpa(*part, None, is_causal, enable_gqa=True, alignment=alignment)
        torch.testing.assert_close(out[rows].transpose(0, 1).double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse, atol=1e-5, rtol=1e-5)
