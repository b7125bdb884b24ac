"""torch.compile, custom operators, fake tensors and shapes without numbers."""

import pytest
import torch
from attn_support.randomness import some
from attn_support.table import ROUTES, TABLE, Case
from torch._subclasses.fake_tensor import FakeTensorMode

from pascal_attn_core import AttentionConfig, sdpa, sdpa_with_lse
from pascal_attn_core.routes import operator

TILED = AttentionConfig(route="tiled")
# A graph of its own for each is slow: one of each kind.
KINDS = ("square", "grouped, causal", "grouped, bool [B, 1, 1, S]", "grouped, float [1, H, L, S]",
         "longer, window (9, 4)", "grouped, tokens_first", "matrices", "two batch dimensions")  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("case", some((case for case in TABLE if case.name in KINDS), 3), ids=lambda case: case.name)
def test_a_compiled_call_is_one_graph_with_the_same_answer_and_gradients(case: Case) -> None:
    for requires_grad in (False, True):
        inputs, options = case.build(requires_grad=requires_grad)
        compiled = torch.compile(lambda *t, o=options: sdpa(*t, **o), fullgraph=True, backend="aot_eager")
        actual, expected = compiled(*inputs), sdpa(*inputs, **options, config=TILED if requires_grad else None)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (actual, expected)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_lse_config_and_dropout_can_be_compiled() -> None:
    query, key, value = (torch.randn(1, 4, 30, 8) for _ in range(3))
    config = AttentionConfig(route="tiled", q_block=7, kv_block=11)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query, key, value, p):
        return sdpa_with_lse(query, key, value, None, p, is_causal=True, config=config)

    expected = sdpa_with_lse(query, key, value, is_causal=True)
    torch.testing.assert_close(tuple(attend(query, key, value, 0.0)), tuple(expected), atol=1e-6, rtol=1e-5)
    torch.manual_seed(5)
    compiled = attend(query, key, value, 0.5).out
    torch.manual_seed(5)
    assert torch.equal(compiled, sdpa(query, key, value, None, 0.5, is_causal=True, config=config))


def test_one_graph_serves_all_lengths() -> None:
    attend = torch.compile(lambda *t: sdpa(*t, is_causal=True), fullgraph=True, dynamic=True, backend="aot_eager")
    counter = torch._dynamo.utils.counters
    counter.clear()
    for length in (20, 33, 57):
        query, key, value = (torch.randn(2, 3, length, 8) for _ in range(3))
        expected = sdpa(query, key, value, is_causal=True)
        torch.testing.assert_close(attend(query, key, value), expected, atol=1e-6, rtol=1e-5)
    assert counter["stats"]["unique_graphs"] == 1


def test_softcap_and_sinks_can_be_compiled_with_gradients() -> None:
    query, sinks = torch.randn(1, 4, 20, 8, requires_grad=True), torch.randn(4, requires_grad=True)

    def model(query, sinks):
        return sdpa(query, query, query, softcap=3.0, sinks=sinks)

    expected = torch.autograd.grad(model(query, sinks).square().sum(), (query, sinks))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(query, sinks).square().sum(), (query, sinks))
    torch.testing.assert_close(actual, expected)


def test_autocast_means_the_same_when_compiled() -> None:
    query, key, value = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8).bfloat16(), torch.randn(1, 2, 70, 8)
    compiled = torch.compile(lambda *t: sdpa(*t, config=TILED), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = compiled(query, key, value), sdpa(query, key, value, config=TILED)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(out, expected)


def _arguments(of, **given):
    """The arguments of an operator in the order of its schema, those not given at their most ordinary."""
    ordinary = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "alignment": "upper_left", "config": "",
                "with_lse": True, "for_grad": False, "wants_mask": False, "wants_sinks": False, "rule": "",
                "rule_shape": [], "rule_tensors": []}  # fmt: skip
    names = [argument.name for argument in of._opoverload._schema.arguments]
    assert set(given) <= set(names)
    return tuple({**dict.fromkeys(names), **ordinary, **given}[name] for name in names)


@pytest.mark.parametrize("for_grad", [False, True])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_the_operator_keeps_its_promises(for_grad: bool, mask: torch.dtype | None) -> None:
    query, key, value = (torch.randn(1, 2, 9, 4, requires_grad=for_grad) for _ in range(3))
    bias = None if mask is None else torch.ones(9, 9).to(mask)
    if for_grad and mask == torch.float32:
        bias.requires_grad_()
    args = _arguments(operator._sdpa, query=query, key=key, value=value, attn_mask=bias, for_grad=for_grad)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    torch.library.opcheck(operator._sdpa, args, test_utils=utils)


def test_the_backward_operator_keeps_its_promises() -> None:
    query, key, value = (torch.randn(1, 2, 9, 4) for _ in range(3))
    tensors = {"query": query, "key": key, "value": value}
    saved = operator._sdpa(*_arguments(operator._sdpa, **tensors, for_grad=True))
    names = [a.name for a in operator._sdpa_backward._opoverload._schema.arguments]
    outputs = dict(zip(names[names.index("out") :], saved))
    args = _arguments(operator._sdpa_backward, grad_out=torch.ones_like(saved[0]), **tensors, **outputs)
    torch.library.opcheck(operator._sdpa_backward, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", TABLE[::5], ids=lambda case: case.name)
def test_fake_and_meta_tensors_have_the_shapes_of_real_ones(case: Case) -> None:
    inputs, options = case.build()
    real = sdpa_with_lse(*inputs, **options, config=TILED)
    with FakeTensorMode() as mode:
        fake = sdpa_with_lse(*(t if t is None else mode.from_tensor(t) for t in inputs), **options, config=TILED)
    for one, other in zip(fake, real):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    on_meta, _ = case.build(device="meta")
    for route in ("auto", "tiled"):
        out = sdpa(*on_meta, **options, config=ROUTES[route])
        assert (out.device.type, out.shape, out.dtype) == ("meta", real.out.shape, real.out.dtype)
