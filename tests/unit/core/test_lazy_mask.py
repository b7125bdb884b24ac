"""LazyMask: what its rule returns is checked at every tile, on every route; rules in compiled graphs."""

import pickle

import pytest
import torch
from attn_support.randomness import some
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pascal_attn_core import AttentionConfig, LazyMask, mask_rule, sdpa, sdpa_with_lse
from pascal_attn_core.flash_attn import flash_attn_func
from pascal_attn_core.observe.memory import PeakMemory

TOKENS = 600
ROUTES = {
    "auto": AttentionConfig(),
    "tiled": AttentionConfig(route="tiled"),
    "online": AttentionConfig(route="tiled", softmax="online"),
    "small tiles": AttentionConfig(route="tiled", q_block=64, kv_block=64),
    "math": AttentionConfig(route="math", math_limit_mib=99),
}


def _inputs(tokens: int = TOKENS, **options) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, tokens, 16, generator=generator).requires_grad_(**options) for _ in range(3)]


def _bias(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return -0.05 * (head + 1) * (query - key).abs()


@mask_rule
def sloped(batch: Tensor, head: Tensor, query: Tensor, key: Tensor, slopes: Tensor) -> Tensor:
    return -slopes[head] * (query - key).abs()


def _mask(rule, tokens: int = TOKENS, **options) -> LazyMask:
    return LazyMask((1, 2, tokens, tokens), rule, device="cpu", **options)


def _late(wrong):
    """A rule that is right for the first element and wrong for the others."""
    return lambda b, h, i, j: i >= j if i.numel() == j.numel() == 1 and not i.item() else wrong(b, h, i, j)


WRONG = {
    "int": (lambda b, h, i, j: i - j, TypeError, "must return a bool or float tensor, got int64"),
    "None": (lambda *_: None, TypeError, "must return a bool or float tensor, got NoneType"),
    "bool": (lambda *_: True, TypeError, "must return a bool or float tensor, got bool"),
    "int late": (_late(lambda b, h, i, j: i - j), TypeError, "of bool must return that, got int64"),
    "None late": (_late(lambda *_: None), TypeError, "must return a tensor, got NoneType"),
    "float late": (_late(_bias), TypeError, r"of bool must return that, got float32 .*pass LazyMask\(..., dtype="),
    "shape": (lambda *_: torch.zeros(3, dtype=torch.bool), ValueError, r"must return what broadcasts to .*got \(3,\)"),
    "depth": (lambda b, h, i, j: (i >= j)[None], ValueError, "must return what broadcasts to"),
    "device": (lambda b, h, i, j: (i >= j).to("meta"), ValueError, "must return a tensor on cpu, got one on meta"),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_rule_that_returns_the_wrong_thing_is_an_error(kind: str, route: str) -> None:
    rule, error, text = WRONG[kind]
    with pytest.raises(error, match=text):
        sdpa(*_inputs(), _mask(rule), config=ROUTES[route])


def test_a_rule_that_turns_wrong_after_the_forward_pass_is_an_error_in_the_backward_pass() -> None:
    is_backward = False
    out = sdpa(*_inputs(requires_grad=True), _mask(lambda b, h, i, j: i - j if is_backward else i >= j))
    is_backward = True
    with pytest.raises(TypeError, match="must return that, got int64"):
        out.sum().backward()


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"shape": (1, 1, 2, -2)}, ValueError, "no negative size"),
    ({"shape": (1, 1, 2)}, ValueError, r"\(B, H, L, S\)"),
    ({"rule": 3}, TypeError, "rule must be a function, got int"),
    ({"dtype": torch.int32}, TypeError, "dtype must be bool, a float dtype or None, got torch.int32"),
    ({"tensors": (1.0,)}, TypeError, "tensors must hold tensors, got float"),
])  # fmt: skip
def test_what_a_mask_is_made_of_is_checked(change: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LazyMask(**{"shape": (1, 1, 2, 2), "rule": _bias, "device": "cpu", **change})


def _never(*_: object) -> torch.Tensor:
    raise AssertionError


def test_an_empty_mask_and_fake_tensors_ask_the_rule_nothing() -> None:
    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8)
    mask = LazyMask((1, 1, 4, 0), _never, device="cpu")
    assert not sdpa(query, key, value, mask).any()
    assert mask.dense().shape == (1, 1, 4, 0)
    with FakeTensorMode():
        query = torch.randn(1, 2, 1 << 17, 64, requires_grad=True)
        mask = LazyMask((1, 1, 1 << 17, 1 << 17), _never, device="cpu", dtype=torch.bool)
        out = sdpa(query, query, query, mask)
        out.sum().backward()
    assert out.shape == query.grad.shape == query.shape


def test_a_registered_rule_is_pickled_by_its_name_and_one_inside_a_function_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        mask_rule(lambda *_: None)
    assert pickle.loads(pickle.dumps(sloped)) is sloped
    with pytest.raises(LookupError, match="no mask_rule is registered"):
        pickle.loads(pickle.dumps(sloped).replace(b"sloped", b"missed"))


SLOPES = torch.tensor([0.3, 0.02])


def _with_registered_rule(query, key, value, slopes):
    shape = (1, 2, query.shape[2], key.shape[2])
    mask = LazyMask(shape, sloped, device="cpu", dtype=torch.float32, tensors=(slopes,))
    return sdpa(query * 1.0, key, value, mask) + 1


def _with_a_closure(query, key, value, slopes):
    twice = slopes * 1.0
    rule = lambda b, h, i, j: -twice[h] * (i - j).abs()  # noqa: E731
    return sdpa(query * 1.0, key, value, LazyMask((1, 2, query.shape[2], key.shape[2]), rule, device="cpu")) + 1


def _with_alibi(query, key, value, slopes):
    tensors = (t.transpose(1, 2) for t in (query, key, value))
    return flash_attn_func(*tensors, causal=True, alibi_slopes=slopes).transpose(1, 2)


OUTSIDE = _mask(lambda b, h, i, j: -SLOPES[h] * (i - j).abs())


def _closed_over(query, key, value, slopes):
    return sdpa_with_lse(query * 1.0, key, value, OUTSIDE).lse


@pytest.mark.torch_2_5
@pytest.mark.parametrize(("function", "fullgraph", "lengths"), some([
    (_with_registered_rule, True, (TOKENS, 410)), (_with_registered_rule, True, (TOKENS,)),
    (_with_a_closure, False, (TOKENS, 410)), (_with_alibi, True, (TOKENS, 410)), (_closed_over, False, (TOKENS,)),
], 5))  # fmt: skip
def test_a_compiled_rule_gives_the_numbers_and_gradients_of_the_eager_one(function, fullgraph, lengths) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph, dynamic=len(lengths) > 1)
    for tokens in lengths:
        inputs = _inputs(tokens, requires_grad=True)
        results = []
        for each in (function, compiled):
            out = each(*inputs, SLOPES)
            grads = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True, materialize_grads=True)
            results.append((out, *grads))
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.torch_2_5
def test_an_unregistered_rule_under_fullgraph_is_an_error_and_no_matrix() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_with_a_closure, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sdpa_between_graphs"):
        compiled(*_inputs(), SLOPES)


@pytest.mark.parametrize(
    ("function", "requires_grad"),
    some([(_with_registered_rule, True), (_with_alibi, False), (_with_a_closure, True)], 3),
)
def test_a_compiled_rule_takes_no_matrix(function, requires_grad: bool) -> None:
    tokens = 4096
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", dynamic=False)
    inputs = _inputs(tokens, requires_grad=requires_grad)
    compiled(*inputs, SLOPES)
    with PeakMemory("cpu") as memory:
        out = compiled(*inputs, SLOPES)
        if requires_grad:
            out.sum().backward()
    assert memory.largest_tensor_bytes < tokens * tokens / 2  # a bool mask of one head has tokens * tokens bytes
