"""flash-attention-turing's functions, and gradients from given results."""

from __future__ import annotations

import pytest
import torch
from attn_support.flash_attn.oracle import plain
from attn_support.fresh import run
from torch import Tensor

from pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa_backward, sdpa_with_lse
from pascal_attn_core.flash_attn.modules import turing

F64 = torch.float64


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def gradients(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, *, causal: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = plain(*leaves, causal=causal)[0]
    return out.detach(), torch.autograd.grad(out, leaves, seed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), [(17, 17), (9, 23), (23, 9)])
def test_forward_and_backward(causal: bool, q_len: int, k_len: int) -> None:
    q, k, v = rand(2, q_len, 4, 16), rand(2, k_len, 2, 16), rand(2, k_len, 2, 16)
    out, lse = turing.fwd(q, k, v, causal)
    seed = torch.randn_like(out)
    expected, grads = gradients(q, k, v, seed, causal=causal)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, 4, q_len)
    for found, right in zip(turing.bwd(q, k, v, out, lse, seed, causal), grads):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_different_lengths(causal: bool) -> None:
    q_ends, k_ends = torch.tensor([0, 5, 5, 12], dtype=torch.int32), torch.tensor([0, 7, 9, 14], dtype=torch.int32)
    q, k, v = rand(12, 4, 8), rand(14, 2, 8), rand(14, 2, 8)
    out, lse = turing.varlen_fwd(q, k, v, q_ends, k_ends, 7, 7, causal)
    assert lse.shape == (3, 4, 7)
    seed = torch.randn_like(out)
    found = turing.varlen_bwd(q, k, v, out, lse, seed, q_ends, k_ends, 7, 7, causal)
    for q0, q1, k0, k1 in ((0, 5, 0, 7), (5, 12, 9, 14)):
        expected, grads = gradients(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], seed[None, q0:q1], causal=causal)
        torch.testing.assert_close(out[None, q0:q1], expected)
        for grad, right, (first, last) in zip(found, grads, ((q0, q1), (k0, k1), (k0, k1))):
            torch.testing.assert_close(grad[None, first:last], right)
    assert not found[1][7:9].any()  # keys of a sequence without queries
    with pytest.raises(ValueError, match="max_seqlen_q must be at least 7, got 6"):
        turing.varlen_fwd(q, k, v, q_ends, k_ends, 6, 7, causal)


def test_its_module_is_there_with_its_six_functions() -> None:
    run("""
        from pascal_attn_core.flash_attn import install_as_flash_attn
        with install_as_flash_attn():
            from flash_attn_turing import bwd, flash_attn_func, flash_attn_varlen_func, fwd, varlen_bwd, varlen_fwd
            import torch
            q = torch.randn(1, 128, 2, 128)
            torch.testing.assert_close(flash_attn_func(q, q, q, 1, 128, 2, 128), fwd(q, q, q, False)[0])
            try:
                flash_attn_func(q, q, q, 1, 64, 2, 128)
            except ValueError as error:
                assert "must be those of q" in str(error)
            else:
                raise SystemExit("sizes that are not those of q")
        try:
            import flash_attn_turing
        except ImportError:
            pass
        else:
            raise SystemExit("gone with the installation")
    """)


def test_a_real_one_is_left_alone(tmp_path) -> None:
    (tmp_path / "flash_attn_turing.py").write_text("real = True\n")
    run(
        """
        from pascal_attn_core.flash_attn import install_as_flash_attn
        with install_as_flash_attn():
            import flash_attn, flash_attn_turing
            assert flash_attn_turing.real
        del __import__("sys").modules["flash_attn_turing"]
        with install_as_flash_attn(replace=True):
            import flash_attn_turing
            assert not hasattr(flash_attn_turing, "real")
        """,
        paths=(tmp_path,),
    )


# ---- gradients from given results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "alignment": "lower_right"},
        {"window": (5, 2)},
        {"softcap": 4.0, "scale": 0.3},
        {"attn_mask": torch.rand(1, 1, 21, 30, generator=torch.Generator().manual_seed(0)) < 0.7},
        {"attn_mask": torch.randn(21, 30, dtype=F64, generator=torch.Generator().manual_seed(0))},
        {"sinks": torch.linspace(-1, 1, 4, dtype=F64)},
    ],
    ids=["plain", "causal", "window", "softcap", "bool mask", "float mask", "sinks"],
)
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_they_are_those_of_autograd(options: dict, with_grad_lse: bool) -> None:
    q, k, v = (t.requires_grad_() for t in (rand(2, 4, 21, 8), rand(2, 2, 30, 8), rand(2, 2, 30, 8)))
    out, lse = sdpa_with_lse(q, k, v, **options, enable_gqa=True)
    seeds = [torch.randn_like(out), torch.randn_like(lse)]
    lse_is_seen = lse.masked_fill(lse == -torch.inf, 0.0)
    outputs = [out, lse_is_seen] if with_grad_lse else [out]
    expected = torch.autograd.grad(outputs, [q, k, v], seeds[: len(outputs)])
    grad_lse = seeds[1].masked_fill(lse == -torch.inf, 0.0) if with_grad_lse else None
    found = sdpa_backward(seeds[0], q, k, v, out, lse, **options, enable_gqa=True, grad_lse=grad_lse)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad


def test_parts_of_the_keys_give_their_parts_of_the_gradients() -> None:
    """As ring attention does it: the results of all keys, the gradients of one part of them at a time."""
    q, k, v = (rand(1, 2, 12, 8).requires_grad_() for _ in range(3))
    out, lse = sdpa_with_lse(q, k, v)
    seed = torch.randn_like(out)
    expected = torch.autograd.grad(out, [q, k, v], seed)
    parts = [sdpa_backward(seed, q, k[..., s, :], v[..., s, :], out, lse) for s in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], expected[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([parts[0][i], parts[1][i]], dim=2), expected[i])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_they_have_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    out, lse = sdpa_with_lse(q, k, v, config=AttentionConfig(route="tiled"))
    seed = torch.randn_like(out)
    expected = torch.autograd.grad(out, [q, k, v], seed)
    for one, other in zip(sdpa_backward(seed, q, k, v, out, lse), expected):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_what_does_not_fit_is_named() -> None:
    q = rand(1, 2, 5, 8)
    out, lse = sdpa_with_lse(q, q, q)
    for name, arguments in (
        ("grad_out", (out[..., :4], q, q, q, out, lse)),
        ("out", (out, q, q, q, out[:, :1], lse)),
        ("lse", (out, q, q, q, out, lse[..., :1])),
    ):
        with pytest.raises(ValueError, match=rf"^{name} must have shape \[1, 2, 5"):
            sdpa_backward(*arguments)
    with pytest.raises(UnsupportedAttention, match="its backward pass takes only results of its own forward pass"):
        sdpa_backward(out, q, q, q, out, lse, config=AttentionConfig(route="torch"))
    with pytest.raises(UnsupportedAttention, match="needs a CUDA or ROCm device"):
        sdpa_backward(out, q, q, q, out, lse, config=AttentionConfig(route="fused"))
