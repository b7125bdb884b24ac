"""flash-attention-turing's module, and gradients from given results."""

import pytest
import torch
from attn_support.flash_attn.oracle import F64, rand
from attn_support.fresh import run

from pascal_attn_core import sdpa_backward, sdpa_with_lse


def test_its_module_is_there_with_its_six_functions() -> None:
    run("""
        from pytest import raises
        from pascal_attn_core.flash_attn import install_as_flash_attn
        with install_as_flash_attn():
            from flash_attn_turing import bwd, flash_attn_func, flash_attn_varlen_func, fwd, varlen_bwd, varlen_fwd
            import torch
            q = torch.randn(1, 128, 2, 128)
            torch.testing.assert_close(flash_attn_func(q, q, q, 1, 128, 2, 128), fwd(q, q, q, False)[0])
            with raises(ValueError, match="must be those of q"):
                flash_attn_func(q, q, q, 1, 64, 2, 128)
        with raises(ImportError):
            import flash_attn_turing
    """)


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
