"""The ComfyUI pack's attention override and the scope around a model call, without ComfyUI."""

import functools
import sys
import types
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy import stub
from attn_support.comfy.stub import Container, make_engine, node_module
from torch import Tensor

override_module = node_module("patches.override")
pytestmark = pytest.mark.usefixtures("stub_host")
HEADS = 2


def tensors(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, tokens, HEADS * 4) for _ in range(3))  # type: ignore[return-value]


def host_attention(*args: Any, **kwargs: Any) -> Tensor:
    host_attention.calls += 1  # type: ignore[attr-defined]
    return stub.host_attention(*args, **kwargs)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    host_attention.calls = 0  # type: ignore[attr-defined]


def another(log: list[str], name: str, below: Any = None) -> Any:
    """Another pack's override; ``below``: the one it passes calls to."""

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return func(*args, **kwargs) if below is None else below(func, *args, **kwargs)

    return override


def ours(engine: Any, previous: Any = None, scope: Any = None) -> Any:
    answer = functools.partial(override_module.by_engine, engine, scope or override_module.Scope())
    return override_module.make_override(engine, answer, previous, "replace it")


def test_a_taken_call_reaches_neither_the_previous_override_nor_the_host() -> None:
    engine, log, given = make_engine(), [], tensors()
    override = ours(engine, another(log, "previous"))
    for _ in range(3):
        out = override(host_attention, *given, HEADS)
    assert (log, host_attention.calls) == ([], 1)  # a few rows of the first one, to compare
    assert engine.run.count("taken") == 3
    torch.testing.assert_close(out, host_attention(*given, HEADS))


def test_a_small_call_goes_to_the_previous_override_as_it_came() -> None:
    engine, log, given = make_engine(min_keys=7), [], tensors()
    out = ours(engine, another(log, "previous"))(host_attention, *given, HEADS)
    assert (log, host_attention.calls) == (["previous"], 1)
    assert torch.equal(out, host_attention(*given, HEADS))
    assert engine.run.reasons("passed to ComfyUI") == {"fewer than 7 keys": 1}


def test_a_call_that_is_not_understood_is_passed_with_all_its_arguments() -> None:
    seen: dict[str, Any] = {}

    def host(*args: Any, **kwargs: Any) -> str:
        seen.update(kwargs, count=len(args))
        return "the host's"

    engine = make_engine()
    assert ours(engine)(host, *tensors(), HEADS, sinks=3, _inside_attn_wrapper=True) == "the host's"
    assert seen == {"count": 4, "sinks": 3, "_inside_attn_wrapper": True}
    assert engine.run.reasons("passed to ComfyUI") == {"its argument sinks is not known": 1}


@pytest.mark.parametrize("batches", [(4, 1), (8, 2), (1, 2)], ids=["HyperTile", "HyperTile with cfg", "k of two"])
def test_key_and_value_are_read_by_the_querys_batch(batches: tuple[int, int]) -> None:
    engine, given = make_engine(), [torch.randn(batch, 12, HEADS * 4) for batch in (*batches, batches[1])]
    out = ours(engine)(host_attention, *given, HEADS)
    torch.testing.assert_close(out, host_attention(*given, HEADS))
    assert engine.run.count("taken") == 1
    tokens = batches[1] * 12 // batches[0]
    assert next(iter(engine.run.tallies)).key[2] == tokens  # and not 12: HyperTile's saving


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_a_call_without_queries_or_keys_is_the_hosts(which: str) -> None:
    engine, given = make_engine(), list(tensors())
    for i in (0,) if which == "queries" else (1, 2):
        given[i] = given[i][:, :0]
    out = ours(engine)(host_attention, *given, HEADS)
    assert torch.equal(out, host_attention(*given, HEADS))
    assert engine.run.reasons("passed to ComfyUI") == {f"it has no {which}": 1}


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``read_by(function)``: calls are read by another function, which is given the call as it is read rightly."""
    kind = node_module("comfy.layout").HostCall
    of = kind.of

    def read(function: Any) -> None:
        monkeypatch.setattr(kind, "of", lambda args, kwargs: function(of(args, kwargs)))

    return read


def test_an_error_in_reading_a_call_never_reaches_the_user(read_by: Any) -> None:
    read_by(Mock(side_effect=RuntimeError("a layout that nobody has thought of")))
    engine, given = make_engine(), tensors()
    out = ours(engine)(host_attention, *given, HEADS, transformer_options={})
    assert torch.equal(out, host_attention(*given, HEADS))
    assert engine.run.count("passed to ComfyUI") == engine.run.count() == 1
    (warning,) = engine.run.warnings
    assert "a layout that nobody has thought of" in warning
    assert "passed to ComfyUI" in warning


def test_cancel_while_a_call_is_read_is_not_kept(read_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Cancel = type("Cancel", (Exception,), {})
    management = types.SimpleNamespace(InterruptProcessingException=Cancel)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)  # type: ignore[arg-type]
    read_by(Mock(side_effect=Cancel))
    with pytest.raises(Cancel):
        ours(make_engine())(host_attention, *tensors(), HEADS)


def test_a_call_that_is_misread_is_found_and_left_to_the_host(read_by: Any) -> None:
    read_by(lambda call: replace(call, given=call.given._replace(value=call.given.value.flip(2))))
    engine, given = make_engine(), tensors(40)
    override = ours(engine)
    for _ in range(3):
        assert torch.equal(override(host_attention, *given, HEADS), host_attention(*given, HEADS))
    assert (engine.run.count("taken"), engine.run.count()) == (0, 3)
    (warning,) = engine.run.warnings
    assert "away from host_attention (values up to 0.87): calls like this are passed to ComfyUI" in warning
    assert engine.run.sample is None


def test_a_right_call_is_compared_once_per_kind_and_run() -> None:
    engine, given = make_engine(), tensors(40)
    override = ours(engine)
    for _ in range(2):
        engine.begin()
        before = host_attention.calls  # type: ignore[attr-defined]
        for _ in range(3):
            override(host_attention, *given, HEADS)
        assert host_attention.calls == before + 1  # type: ignore[attr-defined]
        (found,) = engine.run.compared.values()
        assert found.is_rounding
        engine.end()


def test_a_host_that_cannot_be_asked_is_no_reason_to_leave_a_call() -> None:
    engine = make_engine()
    ours(engine)(Mock(side_effect=RuntimeError("no")), *tensors(), HEADS)
    assert engine.run.count("taken") == 1
    assert any("could not be compared with ComfyUI's own function" in note for note in engine.run.notes)


def test_a_replaced_patch_of_ours_never_stacks() -> None:
    first_engine, second_engine, log = make_engine(), make_engine(min_keys=100), []
    previous = another(log, "previous")
    first = ours(first_engine, override_module.previous_of(previous))
    second = ours(second_engine, override_module.previous_of(first))
    second(host_attention, *tensors(), HEADS)
    assert log == ["previous"]
    assert second_engine.run.count() == 1
    assert not first_engine.is_running


def test_another_packs_wrapper_of_ours_is_not_taken_for_ours() -> None:
    engine, log = make_engine(), []
    override = ours(engine)
    wrapper = functools.wraps(override)(another(log, "wrapper", below=override))
    assert override_module.engine_of(override) is engine
    assert override_module.engine_of(wrapper) is None
    assert override_module.previous_of(wrapper) is wrapper


def test_containers_are_emptied_whether_the_call_is_taken_or_passed_on() -> None:
    for least, taken in ((0, 1), (100, 0)):
        engine, given = make_engine(min_keys=least), tensors()
        boxes = [Container(t) for t in given]
        out = ours(engine)(host_attention, *boxes, HEADS)
        assert all(box.tensor is None for box in boxes)
        assert engine.run.count("taken") == taken
        torch.testing.assert_close(out, host_attention(*given, HEADS))


def test_a_previous_override_that_wants_containers_gets_them_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module("comfy.host"), "attention_function", lambda: host_attention)
    previous = another([], "previous")
    got: list[Any] = []
    previous.container_function = lambda *args, **kwargs: got.extend(args) or "theirs"
    override = ours(make_engine(min_keys=100), previous)
    boxes = [Container(t) for t in tensors()]
    assert override.container_function(*boxes, HEADS) == "theirs"
    assert got[:3] == boxes
    assert all(box.tensor is not None for box in boxes)
    assert not hasattr(ours(make_engine(), another([], "plain")), "container_function")


def test_blocks_are_named_by_the_host_and_else_by_their_number() -> None:
    engine, scope = make_engine(), override_module.Scope()
    override = ours(engine, scope=scope)
    with scope.around(engine, "call", catches=False):
        for options in ({"block": ("input", 4), "block_index": 0}, {"block_type": "double", "block_index": 3}, None):
            override(host_attention, *tensors(), HEADS, transformer_options=options)
    assert [kind.block for kind in engine.run.tallies] == ["input 4.0", "double 3", "call 1"]


def model(x: Tensor) -> Tensor:
    """Three calls: SDPA, something else, SDPA in another layout of arguments."""
    y = F.scaled_dot_product_attention(x, x, x)
    return F.scaled_dot_product_attention(query=torch.relu(y), key=x, value=x, is_causal=True)


def caught(engine: Any, scope: Any, *, catches: bool = True) -> Any:
    wrapper = override_module.make_wrapper(engine, scope, "call", catches=catches)
    return lambda x: wrapper(model, x)


def test_the_whole_model_is_caught_and_the_result_is_the_same() -> None:
    engine, x = make_engine(route="tiled"), torch.randn(1, 2, 9, 4)
    torch.testing.assert_close(caught(engine, override_module.Scope())(x), model(x))
    assert engine.run.routes() == {"tiled": 2}
    assert [kind.block for kind in engine.run.tallies] == ["call 1", "call 2"]
    assert torch.equal(caught(engine, override_module.Scope(), catches=False)(x), model(x))
    assert engine.run.count() == 2, "neither without catching nor after it"


def test_calls_below_the_override_are_not_counted_twice() -> None:
    for least in (0, 100):
        engine, scope = make_engine(min_keys=least, route="torch"), override_module.Scope()
        override = ours(engine, scope=scope)
        wrapper = override_module.make_wrapper(engine, scope, "call", catches=True)
        wrapper(lambda override=override: override(host_attention, *tensors(), HEADS))
        assert engine.run.count() == 1


def test_an_error_below_unwinds_the_scope() -> None:
    engine, scope = make_engine(), override_module.Scope()
    wrapper = override_module.make_wrapper(engine, scope, "call", catches=True)
    override = ours(make_engine(min_keys=100), scope=scope)
    with pytest.raises(KeyboardInterrupt):
        wrapper(lambda: override(Mock(side_effect=KeyboardInterrupt), *tensors(), HEADS))
    assert not scope.local.inside
    model(torch.randn(1, 2, 9, 4))
    assert engine.run.count() == 0


def test_a_direct_call_that_is_not_understood_is_passed_on() -> None:
    engine, scope, x = make_engine(), override_module.Scope(), torch.randn(1, 2, 9, 4)
    with scope.around(engine, "call", catches=True):
        assert F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).shape == x.shape
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(x, x, x, new=1)
    assert engine.run.count("passed to ComfyUI") == engine.run.count() == 1
