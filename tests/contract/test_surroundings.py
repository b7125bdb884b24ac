"""What the surroundings of a call may do: modes, transforms, defaults, and tensors of other kinds."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa
from pascal_attn_core.reference import reference_sdpa

TILED = AttentionConfig(route="tiled")


def _leaves(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode) -> None:
    query, key, value = _leaves()
    with mode():
        out = sdpa(query, key, value, config=TILED)
    assert not out.requires_grad
    torch.testing.assert_close(out, reference_sdpa(query, key, value)[0].detach(), atol=1e-6, rtol=1e-5)


def test_a_graph_can_be_walked_twice() -> None:
    query, key, value = _leaves()
    out = sdpa(query, key, value, None, 0.3, config=TILED).square().sum()
    first = torch.autograd.grad(out, (query, key, value), retain_graph=True)
    second = torch.autograd.grad(out, (query, key, value))
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_nothing_outlives_the_call() -> None:
    (query,) = _leaves(1)
    mask = torch.rand(70, 70) < 0.5
    out = sdpa(query, query, query, mask, config=TILED)
    alive = [weakref.ref(t) for t in (query, mask, out)]
    out.sum().backward()
    del query, mask, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_inputs_changed_before_the_backward_pass_are_noticed() -> None:
    query, _, value = _leaves()
    key = torch.randn(1, 2, 70, 8)
    out = sdpa(query, key, value, config=TILED)
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensors_may_live_elsewhere() -> None:
    query, key, value = _leaves()
    with torch.autograd.graph.save_on_cpu():
        out = sdpa(query, key, value, torch.randn(70, 70), config=TILED)
    out.sum().backward()
    assert query.grad is not None


def test_gradients_have_shapes_without_numbers() -> None:
    query = torch.randn(1, 2, 70, 8, device="meta", requires_grad=True)
    sdpa(query, query, query, is_causal=True, config=TILED).sum().backward()
    assert query.grad.shape == query.shape


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_the_default_dtype_and_device_of_torch_do_not_matter(mask: torch.dtype | None) -> None:
    leaves = _leaves()
    bias = None if mask is None else (torch.rand(70, 70) < 0.5).to(mask)
    torch.manual_seed(1)
    expected = sdpa(*leaves, bias, 0.2, is_causal=True, config=TILED)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            out = sdpa(*leaves, bias, 0.2, is_causal=True, config=TILED)
            out.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)
    assert leaves[0].grad.device.type == "cpu"


def test_deterministic_algorithms_may_be_demanded() -> None:
    leaves = _leaves()
    torch.use_deterministic_algorithms(True)
    try:
        sdpa(*leaves, torch.rand(70, 70) < 0.5, 0.2, config=TILED).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert leaves[0].grad.isfinite().all()


@pytest.mark.parametrize(
    "transform",
    [
        lambda attend: torch.func.grad(lambda query: attend(query).sum())(torch.randn(1, 2, 10, 8)),
        lambda attend: torch.func.vmap(attend)(torch.randn(3, 1, 2, 10, 8)),
        lambda attend: torch.func.jvp(attend, (torch.randn(1, 2, 10, 8),), (torch.randn(1, 2, 10, 8),)),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_transforms_of_functions_work_or_say_what_does(transform) -> None:
    transform(lambda query: sdpa(query, query, query, config=AttentionConfig(route="math")))
    with pytest.raises(UnsupportedAttention, match=r"transforms of torch\.func"):
        transform(lambda query: sdpa(query, query, query, config=TILED))


def test_a_negated_view_is_read_as_what_it_means() -> None:
    query = torch._neg_view(torch.randn(1, 2, 70, 8))
    assert query.is_neg()
    out = sdpa(query, query, query, config=TILED)
    torch.testing.assert_close(
        out, reference_sdpa(query.clone(), query.clone(), query.clone())[0], atol=1e-6, rtol=1e-5
    )


def _nested(layout: torch.layout) -> torch.Tensor:
    parts = [torch.randn(5, 2, 8), torch.randn(7, 2, 8)]
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.parametrize(
    "make",
    [lambda: _nested(torch.strided), lambda: _nested(torch.jagged), lambda: torch.randn(1, 2, 5, 8).to_sparse()],
    ids=["nested", "jagged", "sparse"],
)
def test_tensors_without_strides_are_refused(make) -> None:
    query = make()
    for config in (None, TILED):
        with pytest.raises((TypeError, UnsupportedAttention)):
            sdpa(query, query, query, config=config)


def test_a_config_can_be_copied_and_pickled() -> None:
    config = AttentionConfig(route="tiled", q_block=64)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)).token == config.token
