"""flash-attn's functions without autograd: results, gradients from a given (out, lse), the names programs import."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, leaves_of, plain, rand
from attn_support.fresh import run
from torch import Tensor

from pascal_attn_core import sdpa_backward, sdpa_with_lse
from pascal_attn_core.flash_attn import install_as_flash_attn
from pascal_attn_core.flash_attn.modules import raw, turing
from pascal_attn_core.flash_attn.options import FlashArgumentError

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "scale, causal, window": {"softmax_scale": 0.3, "causal": True, "window_size": (4, -1)},
}


def positional(rule: dict[str, Any]) -> tuple[Any, ...]:
    """The options as flash-attn's own autograd functions pass them: by place."""
    left, right = rule.get("window_size", (-1, -1))
    return (rule.get("softmax_scale"), rule.get("causal", False), left, right, rule.get("softcap", 0.0),
            rule.get("alibi_slopes"))  # fmt: skip


def expected(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rule: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaves = leaves_of([q, k, v])
    out, lse = plain(*leaves, **rule)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def gradients_to_write(*tensors: Tensor) -> list[Tensor]:
    return [torch.full_like(t, torch.nan) for t in tensors]


def by_version_2(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rule: dict[str, Any]) -> tuple[Tensor, Tensor, list]:
    options, grads = positional(rule), gradients_to_write(q, k, v)
    out, lse, no_scores, rng_state = raw.flash_attn_forward(q, k, v, 0.0, *options, False)
    assert no_scores.numel() == 0
    assert rng_state.shape == (2,)
    assert out.is_contiguous()
    raw.flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, *options, True, rng_state)
    return out, lse, grads


def by_turing(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rule: dict[str, Any]) -> tuple[Tensor, Tensor, list]:
    out, lse = turing.fwd(q, k, v, "causal" in rule)
    return out, lse, turing.bwd(q, k, v, out, lse, dout, "causal" in rule)


@pytest.mark.parametrize(
    ("by", "rule"), [*((by_version_2, name) for name in RULES), (by_turing, "plain"), (by_turing, "causal")]
)
@pytest.mark.parametrize(("q_len", "k_len", "kv_heads"), [(17, 17, 4), (9, 23, 2), (23, 9, 1)])
def test_forward_and_backward(by: Callable, rule: str, q_len: int, k_len: int, kv_heads: int) -> None:
    q, k, v = rand(2, q_len, 4, 16), rand(2, k_len, kv_heads, 16), rand(2, k_len, kv_heads, 24)
    dout = rand(2, q_len, 4, 24)
    torch.testing.assert_close(by(q, k, v, dout, RULES[rule]), expected(q, k, v, dout, RULES[rule]))


def test_keys_in_parts_give_the_whole_and_its_gradients() -> None:
    """This is what every ring does: parts merged by lse, gradients of each part from the whole's (out, lse)."""
    q, k, v, dout = (rand(2, 12, 4, 16) for _ in range(4))
    right_out, right_lse, (right_dq, right_dk, right_dv) = expected(q, k, v, dout, {})
    options = positional({})
    parts = list(zip(k.split(5, 1), v.split(5, 1)))
    results = [raw.flash_attn_forward(q, *part, 0.0, *options)[:2] for part in parts]
    lse = torch.stack([part_lse for _, part_lse in results]).logsumexp(0)
    weights = [(part_lse - lse).exp().transpose(1, 2)[..., None] for _, part_lse in results]
    out = sum(weight * part for weight, (part, _) in zip(weights, results))
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, right_out)
    torch.testing.assert_close(lse, right_lse)
    dq, dk, dv = torch.zeros_like(q), [], []
    for part_k, part_v in parts:
        grads = [torch.empty_like(t) for t in (q, part_k, part_v)]
        raw.flash_attn_backward(dout, q, part_k, part_v, out, lse, *grads, 0.0, *options)
        dq += grads[0]
        dk.append(grads[1])
        dv.append(grads[2])
    for found, right in ((dq, right_dq), (torch.cat(dk, 1), right_dk), (torch.cat(dv, 1), right_dv)):
        torch.testing.assert_close(found, right)


ENDS_Q, ENDS_K = [0, 5, 5, 12], [0, 7, 9, 14]


def lengths() -> tuple[Tensor, Tensor, int, int]:
    return torch.tensor(ENDS_Q, dtype=torch.int32), torch.tensor(ENDS_K, dtype=torch.int32), 7, 7


def packed_by_version_2(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rule: dict[str, Any]) -> tuple:
    options, grads = positional(rule), gradients_to_write(q, k, v)
    out, lse, _, rng_state = raw.flash_attn_varlen_forward(q, k, v, *lengths(), 0.0, *options)
    raw.flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *lengths(), 0.0, *options, True, rng_state)
    return out, lse, grads


def packed_by_turing(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rule: dict[str, Any]) -> tuple:
    out, lse = turing.varlen_fwd(q, k, v, *lengths(), "causal" in rule)
    assert lse.shape == (3, 4, 7)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least 7, got 6"):
        turing.varlen_fwd(q, k, v, *lengths()[:2], 6, 7, "causal" in rule)
    grads = turing.varlen_bwd(q, k, v, out, lse, dout, *lengths(), "causal" in rule)
    rows = [row[:, : last - first] for row, (first, last) in zip(lse, itertools.pairwise(ENDS_Q))]
    return out, torch.cat(rows, 1), grads


@pytest.mark.parametrize(
    ("by", "rule"),
    [*((packed_by_version_2, name) for name in RULES), (packed_by_turing, "plain"), (packed_by_turing, "causal")],
)
def test_concatenated_sequences(by: Callable, rule: str) -> None:
    q, k, v, dout = rand(13, 4, 8), rand(15, 2, 8), rand(15, 2, 8), rand(13, 4, 8)  # a token behind the last sequence
    out, lse, grads = by(q, k, v, dout, RULES[rule])
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(ENDS_Q), itertools.pairwise(ENDS_K)):
        if q0 == q1:
            assert not grads[1][k0:k1].any()  # nobody looks at these keys
            continue
        right = expected(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], dout[None, q0:q1], RULES[rule])
        found = [grads[0][None, q0:q1], grads[1][None, k0:k1], grads[2][None, k0:k1]]
        torch.testing.assert_close((out[None, q0:q1], lse[None, :, q0:q1], found), right)
    for rest in (out[12:], grads[0][12:], grads[1][14:], grads[2][14:]):
        assert not rest.any()


def test_wrong_shapes_are_named_and_nothing_is_written() -> None:
    q, k, v, out, lse = *(rand(1, 6, 2, 8) for _ in range(4)), rand(1, 2, 6)
    grads = [torch.full_like(t, 7.0) for t in (q, k, v)]
    given = (0.0, *positional({}))
    with pytest.raises(FlashArgumentError, match=r"softmax_lse must be \[1, 2, 6\], got \[1, 6, 2\]"):
        raw.flash_attn_backward(out, q, k, v, out, lse.transpose(1, 2), *grads, *given)
    with pytest.raises(FlashArgumentError, match=r"out must be \[1, 6, 2, 8\], got \[1, 5, 2, 8\]"):
        raw.flash_attn_backward(out, q, k, v, out[:, 1:], lse, *grads, *given)
    with pytest.raises(FlashArgumentError, match=r"dk must be \[1, 6, 2, 8\], got \[1, 5, 2, 8\]"):
        raw.flash_attn_backward(out, q, k, v, out, lse, grads[0], grads[1][:, 1:], grads[2], *given)
    assert all((grad == 7.0).all() for grad in grads)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="leftpad_k"):
        raw.flash_attn_varlen_forward(q[0], k[0], v[0], cu, cu, 6, 6, *given, leftpad_k=cu)


def test_programs_find_the_names_while_installed() -> None:
    run("""
        import torch
        from pascal_attn_core.flash_attn import install_as_flash_attn
        from pascal_attn_core.flash_attn.modules import raw
        counted = []
        def around(name, function):
            return lambda *a, **k: (counted.append(name), function(*a, **k))[1]
        patch = install_as_flash_attn(around=around)
        import flash_attn.flash_attn_interface as interface
        import flash_attn_interface as third
        names = ["forward", "backward", "varlen_forward", "varlen_backward"]
        for name in names:
            assert callable(getattr(interface, f"_flash_attn_{name}")), name
            assert callable(getattr(interface, f"_wrapped_flash_attn_{name}")), name
        assert callable(third._flash_attn_forward) and callable(third._flash_attn_backward)
        q = torch.randn(1, 6, 2, 8)
        interface._flash_attn_forward(q, q, q, 0.0, None, False)
        interface._wrapped_flash_attn_forward(q, q, q, 0.0, None, False, -1, -1, 0.0, None, False)
        assert counted == ["flash_attn.flash_attn_interface._flash_attn_forward",
                           "flash_attn.flash_attn_interface._wrapped_flash_attn_forward"], counted
        patch.remove()
    """)


def test_a_compiled_graph_ends_before_them_and_goes_on_behind() -> None:
    patch = install_as_flash_attn(replace=True)
    try:
        from flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
            _wrapped_flash_attn_backward,
            _wrapped_flash_attn_forward,
            _wrapped_flash_attn_varlen_forward,
        )

        given = (0.0, None, True, -1, -1, 0.0, None, False)
        ends = torch.tensor([0, 7, 12], dtype=torch.int32)

        def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
            out, lse, _, rng_state = _wrapped_flash_attn_forward(q, k, v, *given)
            grads = [torch.empty_like(t) for t in (q, k, v)]
            sums = _wrapped_flash_attn_backward(dout, q, k, v, out, lse, *grads, *given, rng_state)
            packed = _wrapped_flash_attn_varlen_forward(q[0], k[0], v[0], ends, ends, 7, 7, *given)
            return out, sums, *grads, *packed[:2]

        q, k, v, dout = (rand(1, 12, 2, 8).float() for _ in range(4))
        compiled = torch.compile(step, backend="aot_eager")
        for one, other in zip(compiled(q, k, v, dout), step(q, k, v, dout)):
            torch.testing.assert_close(one, other)
    finally:
        patch.remove()


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
