"""Several devices give the bits of one, for every kind of call that they share; the others stay on the first."""

import collections
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_support.randomness import some
from attn_support.table import ROUTES, TABLE, routes_for
from torch import Tensor

from pascal_attn_core import AttentionConfig, explain, mask_rule, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.call.lazy_mask import LazyMask
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.routes import choose

# Why calls of the table stay on the first device. All others are shared.
REASONS = (
    "it has fewer than 1 queries or keys",
    "it is empty",
    "it has one key/value head",
    "several heads share a step of the tiles: the call is short",
    "whether its float mask is padding is decided for all heads together",
)


@pytest.fixture(autouse=True)
def _helpers_of_its_own() -> Iterator[None]:
    with using(Runtime("cpu")):
        yield


def shared(config: AttentionConfig, *devices: str) -> AttentionConfig:
    return replace(config, devices=devices or ("cpu", "cpu", "cpu"), share_from_tokens=1)


def test_the_bits_are_those_of_one_device() -> None:
    taken: collections.Counter[str] = collections.Counter()
    cases = some(TABLE, 29)
    for case in cases:
        inputs, options = case.build()
        call = check_call(*inputs, **options)
        for route in routes_for(case, of=("auto", "torch", "tiled", "online", "small_tiles", "small_budget")):
            config = ROUTES[route]
            choice = choose(call, shared(config))
            if choice.route == "several":
                taken[route] += 1
                with record() as report:
                    out = sdpa(*inputs, **options, config=shared(config))
                assert torch.equal(out, sdpa(*inputs, **options, config=config)), (case.name, route)
                ((_, stats),) = report.calls.items()
                assert stats.remarks == {}
                assert sum(stats.devices.values()) == call.num_kv_heads
            else:
                assert choice.route == choose(call, config).route
                assert choice.why.rpartition("; on one device: ")[2].startswith(REASONS), (case.name, route, choice.why)
    assert taken["torch"] > 0.2 * len(cases)
    assert taken["small_tiles"] > 0.4 * len(cases)
    assert taken["small_budget"] > 0.3 * len(cases)


@mask_rule
def _near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key).abs() < 50


def _why(config: AttentionConfig, *given: Tensor | LazyMask | None, **options: object) -> str:
    text = explain(*given, **options, config=config)  # type: ignore[arg-type]
    return text.splitlines()[0].rpartition("; on one device: ")[2]


def test_explain_says_why_a_call_stays() -> None:
    config = AttentionConfig(devices=("cpu", "cpu"), share_from_tokens=64, math_limit_mib=0)
    inputs = [torch.randn(1, 4, 100, 16) for _ in range(3)]
    assert explain(*inputs, config=config).startswith("route several: of 4 key/value heads 2 on cpu, 2 on cpu #2")
    lazy = LazyMask((1, 1, 100, 100), _near, device="cpu")
    bias = torch.zeros(100, 100, requires_grad=True)
    assert _why(replace(config, share_from_tokens=101), *inputs) == "it has fewer than 101 queries or keys"
    assert _why(config, *inputs, dropout_p=0.1) == "it has dropout"
    assert _why(config, *inputs, lazy) == "its mask is a rule, not a tensor"
    assert _why(config, *inputs, bias) == "it needs gradients"
    assert choose(check_call(*inputs), config, with_lse=True).why.endswith("its log-sum-exp is wanted")
    assert _why(config, *inputs, sinks=torch.zeros(4)) == "it has attention sinks"
    assert _why(config, *(t[:, :1] for t in inputs)) == "it has one key/value head"
    elsewhere = replace(config, devices=("cuda:0", "cuda:1"))
    assert _why(elsewhere, *inputs) == "its tensors are on cpu, and only calls on cuda:0 are shared"
    mixed = replace(config, devices=("cpu", "cuda:0"))
    assert _why(mixed, *inputs) == "devices of these kinds cannot share a call"
    assert _why(replace(config, math_limit_mib=9), *inputs) == "its score matrix is small"


def test_a_compiled_graph_with_gradients_stays_and_one_without_is_shared() -> None:
    query, key, value = (torch.randn(1, 4, 128, 16) for _ in range(3))
    config = shared(AttentionConfig(route="tiled", q_block=64, kv_block=64))
    alone = replace(config, devices=())
    compiled = torch.compile(lambda *t: sdpa(*t, config=config), fullgraph=True, backend="aot_eager")
    expected = sdpa(query, key, value, config=alone)
    with record() as report:
        assert torch.equal(compiled(query, key, value), expected)
    assert report.routes() == {"several": 1}
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    with record() as report:
        grads = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    assert report.routes() == {"tiled": 1}
    expected = torch.autograd.grad(sdpa(*leaves, config=alone).sum(), leaves)
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize(
    "around", [torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu")]
)
def test_the_callers_modes_hold_for_the_result(around: object) -> None:
    query, key, value = (torch.randn(1, 4, 128, 16) for _ in range(3))
    with around():  # type: ignore[operator]
        outs = [sdpa(query, key, value, config=each(ROUTES["small_tiles"])) for each in (shared, lambda config: config)]
    assert torch.equal(*outs)
    assert len({(out.dtype, out.requires_grad, out.is_inference()) for out in outs}) == 1
