"""FlashAttention-3's names against plain attention, and the kind of error that programs expect."""

from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import plain, rand

from pascal_attn_core.flash_attn.modules import version3


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 3.0}])
def test_version_3(flags: dict[str, Any]) -> None:
    q, k, v = rand(2, 5, 4, 8), rand(2, 7, 2, 8), rand(2, 7, 2, 8)
    expected, lse = plain(q, k, v, **flags)
    torch.testing.assert_close(version3.flash_attn_func(q, k, v, **flags), expected)
    out, got = version3.flash_attn_func(q, k, v, return_attn_probs=True, num_splits=4, pack_gqa=True, **flags)
    torch.testing.assert_close((out, got.double()), (expected, lse))
    torch.testing.assert_close(
        version3.flash_attn_func(q, k, v, 0.3, True), plain(q, k, v, softmax_scale=0.3, causal=True)[0]
    )
    gqa = torch.cat([q, k[:, :5], v[:, :5]], 2)
    torch.testing.assert_close(
        version3.flash_attn_qkvpacked_func(gqa, num_heads_q=4, **flags), plain(q, k[:, :5], v[:, :5], **flags)[0]
    )
    qkv = rand(2, 5, 3, 2, 8)
    torch.testing.assert_close(version3.flash_attn_qkvpacked_func(qkv, **flags), plain(*qkv.unbind(2), **flags)[0])


def test_version_3_of_concatenated_sequences() -> None:
    (ends, key_ends), (q, k, v) = (
        (torch.tensor(n).int() for n in ([0, 4, 6], [0, 3, 8])),
        (rand(n, 2, 8) for n in (6, 8, 8)),
    )
    out, lse = version3.flash_attn_varlen_func(q, k, v, ends, key_ends, 4, 5, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 6)
    torch.testing.assert_close(out[4:], plain(q[None, 4:], k[None, 3:], v[None, 3:], causal=True)[0][0])
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            version3.flash_attn_varlen_func(q, k, v, ends, key_ends, 4, 5, **{name: torch.tensor([3, 2])})


@pytest.mark.parametrize("name", ["q_descale", "attention_chunk", "k_descale", "v_descale", "qv"])
def test_version_3_refuses_what_would_change_the_result(name: str) -> None:
    q = rand(1, 2, 1, 8)
    value: Any = 4 if name == "attention_chunk" else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        version3.flash_attn_func(q, q, q, **{name: value})
