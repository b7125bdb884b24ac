"""Calls that run by what was found out for their kind: each must be the call that a fresh decision makes of it."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attn_support.fused.device import UncheckedKernels, emulated_card
from attn_support.fused.emulation import CARD, T4
from attn_support.randomness import seeds, times
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.fields import steps
from pascal_attn_core.fused.launch.repeat import _pointers
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import Runtime, begin_epoch, using
from pascal_attn_core.routes import prepared, torch_kernel
from pascal_attn_core.routes.torch_faults import TorchAlone

Spec = dict[str, Any]
BASE: Spec = {
    "sizes": (1, 4, 4, 24, 40, 16), "gqa": False, "q": "plain", "k": "plain", "v": "plain", "dtype": torch.float32,
    "mask": "none", "is_causal": False, "scale": None, "dropout_p": 0.0, "wants": "", "mode": "grad",
    "autocast": False, "config": AttentionConfig(math_limit_mib=0), "flags": "", "moved": "", "device": "", "stream": 0,
}  # fmt: skip
CONFIGS = [
    {"route": "tiled"}, {"route": "fused"}, {"route": "fused-tensor"}, {"route": "torch"}, {"route": "math"},
    {"math_limit_mib": 1}, {"fused": False}, {"budget_mib": 1 / 16}, {"q_block": 8},
]  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "sizes": [(2, 4, 4, 24, 40, 16), (1, 4, 4, 25, 40, 16), (1, 4, 4, 24, 41, 16), (1, 4, 4, 24, 40, 24),
              (1, 4, 2, 24, 40, 16), (1, 4, 1, 24, 40, 16), (1, 4, 4, 1, 1030, 16), (1, 4, 4, 1, 1100, 16),
              (1, 4, 4, 1, 1300, 16), (1, 4, 2, 8, 1100, 16)],
    "gqa": [False, True],
    "q": ["inside", "sliced", "gaps", "expanded"],
    "k": ["inside", "sliced", "gaps", "expanded", "one head"],
    "v": ["inside", "sliced", "gaps", "expanded", "wide"],
    "dtype": [torch.float16, torch.bfloat16, torch.float64],
    "mask": ["bool", "padding", "float", "rows", "columns"],
    "is_causal": [True],
    "scale": [0.3, -0.5, 1],
    "dropout_p": [0.25],
    "wants": ["q", "k", "v", "qkv", "mask"],
    "mode": ["no_grad", "inference"],
    "autocast": [True],
    "config": [AttentionConfig(**{"math_limit_mib": 0, **changes}) for changes in CONFIGS],
    "flags": ["no flash", "no math", "deterministic"],
    "moved": ["q", "k", "negated"],
    "device": ["meta", "another card"],
    "stream": [1, 2],
}  # fmt: skip
MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip


def _laid_out(how: str, batch: int, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    if how == "inside":
        return torch.randn(batch, tokens, heads, head_dim).to(dtype).transpose(1, 2)
    if how == "sliced":
        return torch.randn(batch, heads, tokens, 2 * head_dim).to(dtype)[..., :head_dim]
    if how == "gaps":
        return torch.randn(batch, heads, head_dim, tokens).to(dtype).mT
    if how == "one head":
        return torch.randn(batch, 1, tokens, head_dim).to(dtype)
    if how == "wide":
        return torch.randn(batch, heads, tokens, 2 * head_dim).to(dtype)
    if how == "expanded":
        return torch.randn(batch, 1, tokens, head_dim).to(dtype).expand(-1, heads, -1, -1)
    return torch.randn(batch, heads, tokens, head_dim).to(dtype)


def _moved(tensor: Tensor) -> Tensor:
    """The tensor at an address that is no multiple of 16."""
    held = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return held.copy_(tensor)


def _mask(kind: str, batch: int, heads: int, rows: int, keys: int) -> Tensor | None:
    shapes = {"bool": (batch, heads, rows, keys), "padding": (batch, 1, 1, keys), "float": (rows, keys)}
    if kind in ("rows", "columns"):
        return torch.randn(rows, 1).expand(rows, keys) if kind == "rows" else torch.randn(keys, rows).mT
    if kind == "none":
        return None
    drawn = torch.randn(shapes[kind])
    return drawn if kind == "float" else drawn > -0.5


def _inputs(spec: Spec) -> tuple[list[Tensor | None], dict[str, Any]]:
    batch, heads, kv_heads, rows, keys, head_dim = spec["sizes"]
    sizes = {"q": (heads, rows), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    tensors = {name: _laid_out(spec[name], batch, *size, head_dim, spec["dtype"]) for name, size in sizes.items()}
    if spec["moved"] in tensors:
        tensors[spec["moved"]] = _moved(tensors[spec["moved"]])
    elif spec["moved"]:
        tensors["q"] = torch._neg_view(tensors["q"])
    mask = _mask(spec["mask"], batch, heads, rows, keys)
    mask = mask.to(spec["dtype"]) if mask is not None and mask.dtype != torch.bool else mask
    inputs = [*tensors.values(), mask]
    if spec["device"] == "meta":
        inputs = [None if t is None else t.to("meta") for t in inputs]
    wanted = {"mask": (3,)}.get(spec["wants"], ["qkv".index(name) for name in spec["wants"] if name in "qkv"])
    for place in wanted:
        if inputs[place] is not None and inputs[place].is_floating_point():
            inputs[place] = inputs[place].detach().requires_grad_()
    names = ("is_causal", "scale", "dropout_p", "config")
    return inputs, {**{name: spec[name] for name in names}, "enable_gqa": spec["gqa"]}


# Torch's switches by what they allow: how each is read and set.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[bool], Any]]] = {
    "flash": (prepared._flash, torch.backends.cuda.enable_flash_sdp),
    "efficient": (prepared._efficient, torch.backends.cuda.enable_mem_efficient_sdp),
    "math": (prepared._math, torch.backends.cuda.enable_math_sdp),
    "cudnn": (prepared._cudnn, getattr(torch.backends.cuda, "enable_cudnn_sdp", bool)),
    "other": (prepared._other, getattr(torch._C, "_set_sdp_use_overrideable", bool)),
    "library": (prepared._has_cudnn, lambda on: setattr(torch.backends.cudnn, "enabled", on)),
    "deterministic": (prepared._deterministic, lambda on: torch.use_deterministic_algorithms(on, warn_only=True)),
}
_set_order = getattr(torch._C, "_set_sdp_priority_order", tuple)


@contextlib.contextmanager
def _switched(flags: str) -> Iterator[None]:
    """Torch's switches: ``"no X"`` without these kernels, ``"only X"`` with these alone, ``"off"`` without the library
    of cuDNN, ``"cudnn-first"`` in another order than ever."""
    words, order, before = set(flags.split()), list(prepared._priority()), {}
    beside = {"library": "off" not in words, "deterministic": "deterministic" in words}
    for name, (read, allow) in _SWITCHES.items():
        before[name] = read()
        allow(beside.get(name, name in words if "only" in words else not ("no" in words and name in words)))
    _set_order([3, 1, 2, 0, 4] if "cudnn-first" in words else order)
    try:
        yield
    finally:
        for name, was in before.items():
            _SWITCHES[name][1](was)
        _set_order(order)


def _choice_of_a_card(*tensors: Any, **options: Any) -> int:
    """Say what torch answers on a card on which every kernel takes every call (``select_sdp_backend`` of
    ``sdp_utils.cpp``): the first that is allowed, in their order; cuDNN's is not deterministic."""
    has_cudnn = prepared._cudnn() and prepared._has_cudnn() and not prepared._deterministic()
    allowed = {1: prepared._flash(), 2: prepared._efficient(), 0: prepared._math(), 3: has_cudnn, 4: prepared._other()}
    return next((number for number in prepared._priority() if allowed[number]), -1)


@contextlib.contextmanager
def _around(spec: Spec) -> Iterator[None]:
    card = using(Runtime("cpu")) if spec["device"] == "another card" else contextlib.nullcontext()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=spec["autocast"])
    with _switched(spec["flags"]), MODES[spec["mode"]](), card, autocast:
        yield


class Known(dict):
    """Counts the kinds that were found."""

    found = 0

    def get(self, kind: Any, *default: Any) -> Any:
        self.found += kind in self
        return super().get(kind, *default)


class Watch:
    """It records what calls become: those of torch's function, and launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queued: list[Launch]):
        self.queued, self.of_torch, self.streams = queued, list[Any](), list[int]()
        kernels = prepared.runtime_of(torch.device("cpu")).part(Kernels)
        self.driver: Any = kernels.driver if kernels.info.kind == "cuda" else None
        if self.driver is not None:
            monkeypatch.setattr(self.driver, "launch", self._noting(self.driver.launch))
        for module in (torch_kernel, prepared):
            monkeypatch.setattr(module, "torch_sdpa", self._spy(module.torch_sdpa))
        monkeypatch.setattr(prepared, "known", Known())

    def _spy(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spy(*tensors: Any, scale: float | None = None, **options: Any) -> Tensor:
            query, key, value, mask, dropout_p, is_causal = tensors
            given = [None if t is None else (t.shape, t.dtype) for t in (query, key, value, mask)]
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            self.of_torch.append((given, dropout_p, is_causal, scale, options))
            with _switched(""):  # on this CPU
                return function(*tensors, scale=scale, **options)

        return spy

    def _noting(self, launch: Callable[..., None]) -> Callable[..., None]:
        def noting(stream: int, *how: Any) -> None:
            self.streams.append(stream)
            launch(stream, *how)

        return noting

    def found(self, spec: Spec, inputs: list[Any], options: Spec) -> tuple[Any, ...]:
        """Return what one call becomes, and its results where they were computed."""
        self.of_torch.clear()
        self.queued.clear()
        self.streams.clear()
        if self.driver is not None:
            self.driver.current_stream = spec["stream"]
        torch.manual_seed(1)
        try:
            with _around(spec):
                out = sdpa(*inputs, **options)
            leaves = [t for t in inputs if t is not None and t.requires_grad]
            grads = torch.autograd.grad(out.float().square().sum(), leaves) if out.requires_grad else ()
        except (TypeError, ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
            return type(error), str(error), list(self.of_torch)
        of_out = tuple(out.shape), steps(out), out.dtype
        is_copied = spec["autocast"] or spec["moved"] == "negated"  # before anything reads it
        launches = [_described(launch, [None] * 4 if is_copied else inputs, out) for launch in self.queued]
        numbers = () if launches or out.is_meta else [t.detach().nan_to_num(7.0).clone() for t in (out, *grads)]
        assert set(self.streams) <= {spec["stream"]}
        return of_out, launches, list(self.of_torch), numbers


def _described(launch: Launch, inputs: list[Any], out: Tensor) -> tuple[Any, ...]:
    """A launch, whose addresses are those of the call's tensors, or some."""
    params = launch.params
    tensors = {"q": inputs[0], "k": inputs[1], "v": inputs[2], "mask": inputs[3], "o": out}
    fields = {}
    for name, _ in [field for each in type(params).__mro__ for field in each.__dict__.get("_fields_", ())]:
        value = getattr(params, name)
        if name in _pointers(type(params)):
            tensor = tensors.get(name)
            value = bool(value) if tensor is None or not value else value - tensor.data_ptr()
        fields[name] = value if isinstance(value, (int, float, bool, type(None))) else bytes(value)
    return launch.variant.name, launch.function, launch.grid, launch.threads, fields


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)


def _bases() -> list[Spec]:
    bases = [BASE, BASE | {"wants": "qkv"}, BASE | {"dtype": torch.float16}, BASE | {"sizes": OTHERS["sizes"][6]}]
    routes = ("fused", "fused", "fused-tensor", "fused", "tiled", "torch", "math", "fused-tensor")
    configs = [AttentionConfig(math_limit_mib=0, route=route) for route in routes]
    bases += [base | {"config": config} for base, config in zip(bases * 2, configs)]
    bases.append(BASE | {"sizes": OTHERS["sizes"][4], "gqa": True, "is_causal": True})
    return bases


def _differences(
    watch: Watch,
    seed: int,
    count: int,
    names: Sequence[str] = tuple(OTHERS),
    bases: Sequence[Spec] = (),
    others: dict[str, list[Any]] = OTHERS,
) -> Iterator[str]:
    """Pairs of calls whose kinds differ in one property, one of these, made by what is known and afresh: those that
    differ."""
    rng, bases = random.Random(seed), bases or _bases()
    for number in range(count):
        if number % 2 == 0:
            spec, name = rng.choice(bases), rng.choice(names)
        else:
            spec = spec | {name: rng.choice(others[name])}
        torch.manual_seed(rng.randrange(1 << 30))
        inputs, options = _inputs(spec)
        by_kind = watch.found(spec, inputs, options)
        kept, prepared.known = prepared.known, {}
        try:
            afresh = watch.found(spec, inputs, options)
        finally:
            prepared.known = kept
        if not _are_same(by_kind, afresh):
            yield f"{name} {spec}: {by_kind[:3]} != {afresh[:3]}"


@contextlib.contextmanager
def _device(card: str) -> Iterator[list[Launch]]:
    """A CPU, or a card by this name, which queues launches into the list."""
    if card == "CPU":
        answers, prepared_alone = frozenset(), prepared.runtime_of(torch.device("cpu")).part(TorchAlone)
        before, prepared_alone.answers = prepared_alone.answers, answers  # so that the memo has something to do
        try:
            yield []
        finally:
            prepared_alone.answers = before
        return
    info = {"GTX 1080 Ti": CARD, "T4": T4}[card]
    with emulated_card(lambda launch: None, info, UncheckedKernels) as kernels:
        yield kernels.queued


@pytest.mark.torch_2_5
@pytest.mark.parametrize("card", ["CPU", "GTX 1080 Ti", "T4"])
@pytest.mark.parametrize("seed", seeds(2))
def test_every_call_is_what_a_fresh_decision_makes_of_it(monkeypatch: pytest.MonkeyPatch, card: str, seed: int) -> None:
    with _device(card) as queued:
        watch = Watch(monkeypatch, queued)
        assert list(_differences(watch, seed, times(100))) == []
        assert prepared.known.found > times(100) // 6  # type: ignore[attr-defined]


# The parts of a kind, in their order, and which property of a call shows on which device that it is read. "answers": a
# CPU, and torch answers as on a card; two sets of switches for which it chooses other kernels.
_PARTS: list[tuple[str, str, tuple[str, ...]]] = [
    ("shape of query", "CPU", ("sizes",)),
    ("shape of key", "CPU", ("k",)),
    ("shape of value", "CPU", ("v",)),
    ("keys", "GTX 1080 Ti", ("sizes",)),
    ("dtype", "GTX 1080 Ti", ("dtype",)),
    ("device", "GTX 1080 Ti", ("device",)),
    ("strides of query", "GTX 1080 Ti", ("q",)),
    ("strides of key", "GTX 1080 Ti", ("k",)),
    ("strides of value", "GTX 1080 Ti", ("v",)),
    ("mask", "CPU", ("mask",)),
    ("gradients", "GTX 1080 Ti", ("wants", "mode")),
    ("dropout_p", "CPU", ("dropout_p",)),
    ("is_causal", "GTX 1080 Ti", ("is_causal",)),
    ("scale", "GTX 1080 Ti", ("scale",)),
    ("enable_gqa", "CPU", ("gqa",)),
    ("config", "CPU", ("config",)),
    ("epoch", "GTX 1080 Ti", ("device",)),
    ("flash", "answers", ("only flash", "only")),
    ("efficient", "answers", ("only efficient", "only")),
    ("math", "answers", ("only math cudnn", "only cudnn")),
    ("cudnn", "answers", ("only cudnn", "only")),
    ("other", "answers", ("only other", "only")),
    ("deterministic", "answers", ("only cudnn", "only cudnn deterministic")),
    ("has cudnn", "answers", ("only cudnn", "only cudnn off")),
    ("priority", "answers", ("only math cudnn", "only math cudnn cudnn-first")),
]


@pytest.mark.torch_2_5
@pytest.mark.parametrize(("part", "card", "names"), _PARTS)
def test_a_part_of_the_kind_that_is_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, part: str, card: str, names: tuple[str, ...]
) -> None:
    place, kind_of = [name for name, *_ in _PARTS].index(part), prepared.kind_of

    def without(*given: Any) -> Any:
        kind = kind_of(*given)
        if not kind:
            return kind
        left = (0,) if isinstance(kind[place], tuple) and part == "keys" else 0
        return (*kind[:place], left, *(() if part == "priority" else kind[place + 1 :]))

    monkeypatch.setattr(prepared, "kind_of", without)
    rows: tuple[Any, ...] = (400, names)
    if card == "answers":
        if part in ("cudnn", "other", "deterministic", "has cudnn", "priority") and not prepared._priority():
            pytest.skip("this torch has no such switch")
        monkeypatch.setattr(torch, "_fused_sdp_choice", _choice_of_a_card)
        rows = 4, ("flags",), [BASE | {"flags": names[0]}], {"flags": [names[1]]}
    with _device("CPU" if card == "answers" else card) as queued:
        assert any(_differences(Watch(monkeypatch, queued), 0, *rows))


def test_tensors_that_no_kernel_reads_as_they_lie_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_are_alike", lambda *tensors: True)
    with _device("GTX 1080 Ti") as queued:
        assert any(_differences(Watch(monkeypatch, queued), 0, 200, ("moved",)))


def _choices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls for which a route is chosen from now on."""
    from pascal_attn_core.routes import run

    choose, seen = run.choose, list[Any]()

    def counted(call: Any, *given: Any, **options: Any) -> Any:
        seen.append(call)
        return choose(call, *given, **options)

    monkeypatch.setattr(run, "choose", counted)
    return seen


def test_the_second_call_of_a_kind_asks_nobody_until_something_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, config = _choices(monkeypatch), AttentionConfig(route="fused")
    with _device("GTX 1080 Ti"):
        inputs = [torch.randn(1, 2, 40, 16) for _ in range(3)]

        def asked() -> int:
            before = len(seen)
            sdpa(*inputs, config=config)
            return len(seen) - before

        assert [asked(), asked(), asked()] == [1, 0, 0]
        begin_epoch()
        assert [asked(), asked()] == [1, 0]
        monkeypatch.setattr(prepared.time, "monotonic", lambda: 1e12)
        assert asked() == 1  # after some seconds
        config = AttentionConfig(route="fused")  # an equal one
        assert asked() == 0


def test_decoding_with_a_key_more_in_each_call_is_chosen_once_for_256_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _choices(monkeypatch)
    monkeypatch.setattr(prepared, "known", {})
    with _device("GTX 1080 Ti") as queued:
        query, key, value = torch.randn(1, 8, 1, 64), *(torch.randn(1, 2, 3000, 64) for _ in range(2))
        for keys in range(1024, 2048):
            cached = key[:, :, :keys], value[:, :, :keys]
            for own in (cached, [t.contiguous() for t in cached]) if keys % 64 == 0 else (cached,):
                sdpa(query, *own, enable_gqa=True, config=AttentionConfig(route="fused"))
                assert {launch.params.lk for launch in queued} == {keys}
                assert {launch.params.kh for launch in queued} == {own[0].stride(1)}
                queued.clear()
    assert len(seen) == len(prepared.known) == 8


def test_what_a_mask_holds_is_read_in_each_call() -> None:
    """A float mask that is written in place may concern a fault of torch's gradients in the next call."""
    leaves = [torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(1, 1, 1, 300)
    for _ in range(2):
        for fill in (0.0, -10_000.0):
            mask.fill_(fill)
            inputs = [*leaves, mask]
            out = sdpa(*inputs, config=AttentionConfig(math_limit_mib=0))
            actual = torch.autograd.grad(out.square().sum(), leaves)
            double = [t.detach().double().requires_grad_() for t in leaves]
            expected = torch.nn.functional.scaled_dot_product_attention(*double, mask.double())
            for mine, right in zip(actual, torch.autograd.grad(expected.square().sum(), double)):
                torch.testing.assert_close(mine.double(), right, atol=2e-3, rtol=1e-3)


def test_kinds_are_few_and_threads_may_forget_them() -> None:
    stop, wrong = threading.Event(), list[BaseException]()
    calls = [[torch.randn(1, 2, tokens, 16) for _ in range(3)] for tokens in range(30, 50)]
    config = AttentionConfig(route="tiled")
    expected = [sdpa(*inputs, config=config) for inputs in calls]

    def work() -> None:
        try:
            for _ in range(20):
                for inputs, right in zip(calls, expected):
                    assert torch.equal(sdpa(*inputs, config=config), right)
        except BaseException as error:
            wrong.append(error)

    def forget() -> None:
        while not stop.wait(0.0005):
            prepared.known.clear()
            begin_epoch()

    threads = [threading.Thread(target=work) for _ in range(3)]
    forgetful = threading.Thread(target=forget)
    for thread in (*threads, forgetful):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    forgetful.join()
    assert wrong == []


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_gradients_of_the_third_call_are_those_of_the_definition(options: dict[str, Any]) -> None:
    config, heads = AttentionConfig(route="fused"), 1 if options.get("enable_gqa") else 2
    with emulated_card() as kernels:
        for _ in range(3):
            leaves = [torch.randn(1, n, 40, 32, requires_grad=True) for n in (2, heads, heads)]
            kernels.queued.clear()
            out = sdpa(*leaves, **options, config=config)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            double = [t.detach().double().requires_grad_() for t in leaves]
            expected = torch.nn.functional.scaled_dot_product_attention(*double, **options)
            right = (expected, *torch.autograd.grad(expected.square().sum(), double))
            for mine, its in zip((out, *grads), right):
                torch.testing.assert_close(mine.double(), its, atol=1e-5, rtol=1e-4)
            assert kernels.queued


def test_tensors_that_hooks_have_moved_are_read_where_they_lie() -> None:
    """Tensors that autograd has saved may come back with other strides, as from a CPU."""
    config, moved = (
        AttentionConfig(route="fused"),
        torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, Tensor.clone),
    )
    with emulated_card():
        whole = [torch.randn(1, 2, 40, 64, requires_grad=True) for _ in range(3)]
        for hooks in (*[contextlib.nullcontext()] * 3, moved):
            with hooks:
                out = sdpa(*(t[..., :32] for t in whole), config=config)
            grads = torch.autograd.grad(out, whole, torch.ones_like(out))
            double = [t.detach().double().requires_grad_() for t in whole]
            expected = torch.nn.functional.scaled_dot_product_attention(*(t[..., :32] for t in double))
            for mine, its in zip(grads, torch.autograd.grad(expected.sum(), double)):
                torch.testing.assert_close(mine.double(), its, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("limit", [0, 64])
def test_batches_beyond_a_grid_are_none_that_torch_takes_as_they_came(monkeypatch: Any, limit: int) -> None:
    monkeypatch.setattr(prepared, "MOST_BLOCKS", 3)
    monkeypatch.setattr(prepared, "known", {})
    for batch in (3, 4):
        sdpa(*[torch.randn(batch, 2, 16, 4)] * 3, config=AttentionConfig(math_limit_mib=limit))
        assert [ready.given is not None for ready in prepared.known.values()] == [True] * (batch > 3)
