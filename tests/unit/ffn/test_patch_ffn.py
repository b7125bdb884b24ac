"""patch_ffn: memory kept, results and gradients unchanged, arguments of the call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from attn_support.ffn_zoo import Ffn, Geglu, mlp
from torch import Tensor, nn

from pascal_attn_core.ffn import patch_ffn
from pascal_attn_core.observe.memory import PeakMemory, measure

MIB = 1 << 20


@pytest.mark.parametrize(
    ("make", "shape", "budget_mib", "most_slices"),
    [
        (lambda: mlp(96, 560), (1, 8192, 96), 4.0, 10),  # Wan 1.3B, a sixteenth as wide: 512 MiB -> 64 MiB there
        (lambda: nn.Sequential(Geglu(), nn.Dropout(0.0), nn.Linear(64, 16)).eval(), (2, 8192, 16), 2.0, 12),
        (lambda: mlp(192, 768), (1, 4096, 192), 4.0, 7),  # Flux
    ],
    ids=["Wan", "SDXL", "Flux"],
)
def test_the_peak_stays_under_the_budget_from_the_first_call_on(make, shape, budget_mib, most_slices) -> None:
    module, x = make(), torch.randn(shape)
    with torch.no_grad():
        whole = measure(module, x)
        with patch_ffn(module, include="", budget_mib=budget_mib) as patch:
            first, second = measure(module, x), measure(module, x)
        line = patch.report().lines[0]
    assert whole.extra_bytes > 4 * budget_mib * MIB
    assert first.extra_bytes <= budget_mib * MIB
    assert second.extra_bytes <= budget_mib * MIB
    assert second.extra_bytes > 0.8 * budget_mib * MIB  # fewer slices would not fit
    assert int(line.why.split()[0]) <= most_slices
    torch.testing.assert_close(second.out, whole.out)


def assert_same(module: nn.Module, call: Callable[[], Tensor], state: str = "on", *, chunk_tokens: int = 32) -> None:
    """The call of a patched module gives what it gave before, to the bit if it is refused, and the report says so."""
    expected, close = call(), {"rtol": 0.0, "atol": 0.0} if state == "refused" else {}
    with patch_ffn(module, include="", chunk_tokens=chunk_tokens, min_tokens=2) as patch:
        torch.testing.assert_close(call(), expected, **close)
        assert patch.report().lines[0].state == state, patch.report().text()


def test_a_budget_too_small_for_any_slice_keeps_slices_worth_their_time() -> None:
    module, x = mlp(16, 64), torch.randn(1, 4096, 16)
    with torch.no_grad(), patch_ffn(module, include="", budget_mib=1e-6) as patch:
        torch.testing.assert_close(module(x), module.forward.whole(x))
        assert patch.report().lines[0].why.startswith("64 slices")


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_equal_and_their_peak_falls(frozen: bool) -> None:
    sliced = mlp(32, 256).train().requires_grad_(not frozen)
    plain = copy.deepcopy(sliced)
    one = torch.randn(2, 2048, 32, requires_grad=True)
    two = one.detach().clone().requires_grad_()
    with PeakMemory() as whole:
        plain(one).square().sum().backward()
    with patch_ffn(sliced, include="", budget_mib=2.0) as patch:
        sliced(two.detach().requires_grad_()).sum().backward()
        sliced.zero_grad(set_to_none=True)
        with PeakMemory() as peak:
            sliced(two).square().sum().backward()
        assert patch.report().lines[0].state == "on"
    torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(sliced.parameters(), plain.parameters()):
        if not frozen:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-3)
    assert peak.peak_bytes < 0.5 * whole.peak_bytes


def test_inference_mode_and_autocast() -> None:
    module, x = mlp(16, 64), torch.randn(2, 512, 16)
    with patch_ffn(module, include="", chunk_tokens=64) as patch:
        with torch.inference_mode():
            out = module(x)
        assert patch.report().lines[0].state == "on"
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cast = module(x)
        assert [plan.refused for plan in patch._binding._site(module).used.values()] == [False, False]
    with torch.inference_mode():
        torch.testing.assert_close(out, module(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cast, module(x))
    assert cast.dtype == torch.bfloat16


class Shifted(Ffn):
    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return self.mlp(x * scale if shift is None else x * scale + shift)


@pytest.mark.parametrize(
    "shift", [torch.randn(2, 96, 16), torch.randn(96, 16), torch.randn(2, 1, 16), torch.randn(16), torch.randn(96, 1)]
)
@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_with_a_token_dimension_are_sliced_and_others_passed_whole(shift: Tensor, by_name: bool) -> None:
    module, x = Shifted().eval(), torch.randn(2, 96, 16)
    call = (lambda: module(x, shift=shift, scale=2.0)) if by_name else (lambda: module(x, shift, 2.0))
    with torch.no_grad():
        assert_same(module, call)


@pytest.mark.parametrize(
    "shape",
    [(96, 16), (3, 96, 16), (2, 3, 96, 16), (32, 8, 16), *((1, tokens, 16) for tokens in (5, 7, 33, 96, 97, 101))],
)
def test_any_rank_batch_and_length(shape: tuple[int, ...]) -> None:
    module, x = Ffn().eval(), torch.randn(shape)
    with torch.no_grad():
        assert_same(module, lambda: torch.stack([module(x), module(x.mT.contiguous().mT)]), chunk_tokens=4)


@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("shape", [(1, 96, 16), (3, 96, 16), (1, 1, 96, 16)])
def test_frozen_layers_without_bias(shape: tuple[int, ...], wants_grad: bool) -> None:
    """As ComfyUI's models and a LoRA's base have them: torch chooses their matrix product by the input's strides."""
    module = nn.Sequential(nn.Linear(16, 64, bias=False), nn.SiLU(), nn.Linear(64, 16, bias=False))
    x = torch.randn(shape, requires_grad=wants_grad)
    assert_same(module.requires_grad_(False), lambda: module(x), chunk_tokens=24)


def test_empty_and_tiny_inputs_run_whole() -> None:
    module = Ffn().eval()
    with torch.no_grad(), patch_ffn(module, include="", chunk_tokens=2, min_tokens=2) as patch:
        assert module(torch.randn(1, 0, 16)).shape == (1, 0, 16)
        assert module(torch.randn(16)).shape == (16,)
        assert module(x=torch.randn(1, 3, 16)).shape == (1, 3, 16)
        assert module(torch.randn(0, 64, 16)).shape == (0, 64, 16)
    assert patch.sites == 1


@pytest.mark.parametrize(
    ("tokens", "num_chunks", "sizes"), [(96, 3, "3 slices of 32"), (96, 5, "5 slices of 20"), (5, 5, "2 slices of 3")]
)
def test_a_number_of_slices_can_be_asked_for(tokens: int, num_chunks: int, sizes: str) -> None:
    module, x = Ffn().eval(), torch.randn(2, tokens, 16)
    with torch.no_grad(), patch_ffn(module, include="", num_chunks=num_chunks, min_seq=2) as patch:
        torch.testing.assert_close(module(x), module.forward(x))
        assert patch.report().lines[0].state == "on"
        assert sizes in patch.report().lines[0].why
        module(torch.randn(2, 1, 16))  # fewer than min_seq
        assert len(patch.report().lines) == 1
    with torch.no_grad(), patch_ffn(module, include="", num_chunks=num_chunks, min_seq=tokens + 1) as patch:
        module(x)
        assert patch.report().lines[0].state == "waiting"


def test_the_environment_gives_the_number_where_the_program_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASCAL_ATTN_FFN_CHUNKS", "4")
    module, x = Ffn().eval(), torch.randn(2, 96, 16)
    for given, words in (({}, "4 slices of 24"), ({"num_chunks": 2}, "2 slices of 48"), ({"budget_mib": 64}, "fits")):
        with torch.no_grad(), patch_ffn(module, include="", min_tokens=2, **given) as patch:
            module(x)
            assert words in patch.report().lines[0].why


@pytest.mark.parametrize("sliced_before", [False, True])
def test_a_trace_is_of_the_whole_module_and_serves_all_lengths(sliced_before: bool) -> None:
    module, x, longer = mlp(32, 256).requires_grad_(False), torch.randn(1, 300, 32), torch.randn(2, 500, 32)
    expected = module(x), module(longer)
    with patch_ffn(module, include="", num_chunks=4) as patch:
        if sliced_before:
            module(x)
        traced = torch.jit.trace(module, x)
        assert len(patch.report().lines) == 1
    torch.testing.assert_close((traced(x), traced(longer)), expected)


class Two(nn.Module):
    """Two feed-forward modules, one of them in a list, and a head that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(16, 64), mlp(16, 64)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_plain_sequentials_are_found_and_heads_are_not() -> None:
    model = Two().eval()
    with patch_ffn(model) as patch:
        assert [line.name for line in patch.report().lines] == ["blocks.0", "blocks.1"]
        assert patch.num_wrapped == 2
        assert patch.active
    assert patch.num_wrapped == 0
    assert not patch.active
    assert all("forward" not in block.__dict__ for block in model.blocks)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": "blocks.[1-9]"}, ["blocks.1"]),
        ({"include": ["blocks.0", "head"]}, ["blocks.0", "head"]),
        ({"include": nn.Linear}, ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"]),
        ({"include": lambda name, module: name == "head"}, ["head"]),
        ({"exclude": "blocks.0"}, ["blocks.1"]),
        ({"include": nn.Sequential, "exclude": "*.1"}, ["blocks.0"]),
    ],
)
def test_include_and_exclude_take_patterns_classes_and_predicates(options: dict, names: list[str]) -> None:
    with patch_ffn(Two(), **options) as patch:
        assert [line.name for line in patch.report().lines] == names


def test_a_report_names_what_happened_in_one_line_each() -> None:
    model = Two().eval()
    with torch.no_grad(), patch_ffn(model, chunk_tokens=64, min_tokens=2) as patch:
        assert "2 waiting" in patch.report().text()
        model(torch.randn(1, 256, 16))
        text = patch.report().text()
    assert text.splitlines() == [
        "2 feed-forward modules: 2 on",
        "  blocks.0 and 1 more (Sequential): on: 4 slices of 64 tokens (0.1 MiB whole)",
    ]


def test_a_module_used_twice_is_patched_once() -> None:
    model = Two()
    model.blocks[1] = model.blocks[0]
    with patch_ffn(model) as patch:
        assert patch.num_wrapped == 1
    assert "forward" not in model.blocks[0].__dict__


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget_mib": 0}, ValueError),
        ({"budget_mib": "64"}, TypeError),
        ({"chunk_tokens": 1}, ValueError),
        ({"chunk_tokens": 2.5}, TypeError),
        ({"chunk_tokens": 16, "num_chunks": 2}, ValueError),
        ({"num_chunks": -1}, ValueError),
        ({"min_tokens": True}, TypeError),
        ({"checkpoint": 1}, TypeError),
        ({"include": 3}, TypeError),
        ({"exclude": [3]}, TypeError),
    ],
)
def test_arguments_that_cannot_be_used_are_named(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        patch_ffn(Two(), **options)


def test_threads_may_call() -> None:
    module, x = Ffn().eval(), torch.randn(1, 64, 16)
    with torch.no_grad():
        expected, outs = module(x), []
    with patch_ffn(module, include="", chunk_tokens=16, min_tokens=2):

        def work() -> None:
            with torch.no_grad():
                outs.extend(module(x) for _ in range(20))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outs) == 80
    for out in outs:
        torch.testing.assert_close(out, expected)
