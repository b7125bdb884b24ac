"""Pascal Memory Estimate without ComfyUI: following a model without its numbers, and what becomes of what was found."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy.stub import node_module
from attn_support.ffn_zoo import mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.observe.memory import measure

estimate, trace = (node_module(name) for name in ("estimate.figures", "estimate.trace"))
text = node_module("estimate.text")
MIB = 1 << 20
MEMORY = {"weight_bytes": 20 << 30, "available_bytes": 10 << 30, "total_bytes": 11 << 30}
AT = {"device": torch.device("cpu"), "info": DeviceInfo("cpu", "CPU"), "attention": ""}
HOST = estimate.Subject("Flux", **MEMORY, **AT, ffn_budget_mib=64)


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.qkv, self.ffn, self.heads = nn.Linear(width, 3 * width), mlp(width, 4 * width), heads
        self.seen: list[Any] = []
        self.register_buffer("positions", torch.arange(8.0))

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.last = x
        scale = float(self.positions[3])  # a model may read its constants
        x = x + scale * self.attention(*self.qkv(x).chunk(3, dim=-1))
        return x + self.ffn(x)


def follow(module: nn.Module, x: Tensor) -> Any:
    tracer = trace.Tracer()
    shadow = trace.Shadow(tracer.shapes).of(module)
    tracer.watch(shadow)
    return tracer.run(lambda: shadow(x))


def test_calls_are_found_with_their_shapes() -> None:
    call = follow(Block(), torch.zeros(2, 96, 32))
    shape = (2, 4, 96, 8)
    assert call.of(trace.AttentionShape) == [trace.AttentionShape(shape, shape, shape, torch.float32)]
    assert [(ffn.name, ffn.shape) for ffn in call.of(trace.FfnShape)] == [("ffn", (2, 96, 32))]


def test_memory_of_a_feed_forward_call_is_exact_and_of_other_tensors_counted_outside_of_the_calls() -> None:
    block, x = Block(), torch.zeros(1, 1000, 32)
    call, token = follow(block, x), 1000 * 32 * 4
    with torch.no_grad():
        assert (
            call.of(trace.FfnShape)[0].extra_bytes == measure(block.ffn, x).extra_bytes == (4 + 4 - 1) * token
        )  # without its output
    assert 3 * token <= call.other_bytes <= 5 * token  # q, k and v in one tensor, the result, the sum
    assert call.calls[0][1] == 4 * token


def test_the_module_and_its_lists_stay_as_they_were() -> None:
    block = Block()
    block.ffn[0].register_forward_hook(lambda *args: pytest.fail("a hook ran"))
    block.qkv.forward = block.ffn.forward = lambda x: pytest.fail("another pack's patch ran")  # type: ignore[method-assign]
    state, attributes = {k: v.data_ptr() for k, v in block.state_dict().items()}, set(vars(block))
    follow(block, torch.zeros(1, 64, 32))
    assert {k: v.data_ptr() for k, v in block.state_dict().items()} == state
    assert set(vars(block)) == attributes
    assert block.seen == []
    assert not any(isinstance(p, FakeTensor) for p in block.parameters())


def test_a_model_far_too_large_for_this_computer_is_followed() -> None:
    with torch.device("meta"):
        block = Block(16384, 128)
    block.positions = torch.arange(8.0)
    call = follow(block, torch.zeros(1, 16, 16384).expand(1, 16, 16384))
    assert call.of(trace.AttentionShape)[0].query == (1, 128, 16, 128)


def call_of(*shapes: Any, live: int = 0, other: int = 0) -> Any:
    return trace.ModelCall([(shape, live) for shape in shapes], other)


def attention_shape(tokens: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Any:
    return trace.AttentionShape(*((1, 24, tokens, 128),) * 3, dtype)


def attention_bytes(found: Any) -> Any:
    return next(iter(found.needs.values())).sizes


def why(found: Any) -> str:
    return next(iter(found.needs.values())).why


@pytest.fixture
def takes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Indirect parameter: whether PyTorch has a fused kernel for every call."""
    monkeypatch.setattr(estimate, "fused_takes", lambda shape, device: request.param)
    return request.param


CARD = dataclasses.replace(HOST, info=DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30))
either = pytest.mark.parametrize("takes", [True, False], indirect=True)


@either
def test_what_pytorch_does_without_the_patch_decides_what_it_saves(takes: bool) -> None:
    found = estimate.Figures(call_of(attention_shape(), live=MIB), CARD)
    assert attention_bytes(found)[0] == (768 * MIB if takes is False else 0)
    assert attention_bytes(found)[1] == 0 if takes else 0 < attention_bytes(found)[1] <= 64 * MIB
    assert found.peaks[0] == MIB + attention_bytes(found)[0]
    assert found.peaks[1] == MIB + attention_bytes(found)[1]


@pytest.mark.parametrize("takes", [False], indirect=True)
@pytest.mark.parametrize(("arch", "has_kernel"), [("gfx906", True), ("gfx803", False)])
def test_amd_cards_that_have_a_kernel_are_told_and_another_method_of_the_host_is_not_counted(
    takes: bool, arch: str, has_kernel: bool
) -> None:
    card = dataclasses.replace(HOST, info=DeviceInfo("hip", "AMD", num_sms=60, arch=arch, total_bytes=16 << 30))
    found = estimate.Figures(call_of(attention_shape()), card)
    assert attention_bytes(found)[0] == 768 * MIB
    assert why(found).startswith("PyTorch has no fused kernel for it here and stores the score matrix")
    assert why(found).endswith("; the patch has a kernel that does not store it, and tiles") == has_kernel
    found = estimate.Figures(call_of(attention_shape()), dataclasses.replace(card, attention="attention_split"))
    assert attention_bytes(found)[0] == 0
    assert "attention_split" in why(found)


def test_chunking_bounds_long_calls_only() -> None:
    shape = trace.FfnShape("ffn", "Ffn", (1, 4096, 64), torch.float32, 500 * MIB)
    short = shape._replace(shape=(1, 1023, 64), extra_bytes=100 * MIB)
    found = estimate.Figures(call_of(shape, short, live=7, other=MIB), HOST)
    assert [found.needs[each].sizes for each in (shape, short)] == [(500 * MIB, 64 * MIB), (100 * MIB, 100 * MIB)]
    assert found.peaks == [500 * MIB + 7, 100 * MIB + 7]
    found = estimate.Figures(call_of(shape, short, other=900 * MIB), HOST)
    assert found.peaks == [900 * MIB, 900 * MIB], "never below the other tensors"


def text_for(call: Any, **changes: Any) -> str:
    return text.text_of(estimate.Figures(call, dataclasses.replace(HOST, **changes)), [(1, 16, 128, 128)])


def test_each_part_is_told_with_its_largest_call() -> None:
    layers = [trace.FfnShape(f"ffn {i}", "Ffn", (1, 4096, 64), torch.float32, i * MIB) for i in (100, 200)]
    told = text_for(call_of(attention_shape(), *layers)).splitlines()
    assert told[2].startswith("Attention: 1 call, nothing without the patch, ")
    assert "the largest 1 x 24 heads x 4096 queries x 4096 keys of 128 in bfloat16: PyTorch has a" in told[2]
    assert told[3] == (
        "Feed-forward: 2 calls, at least 200 MiB without the patch, 64 MiB at most with it; "
        "the largest ffn 200 (Ffn) on 1 x 4096 x 64 in float32: the patch chunks it, budget 64 MiB."
    )
    assert text_for(call_of()).splitlines()[2:4] == ["Attention: no call found.", "Feed-forward: no call found."]


@pytest.mark.parametrize(
    ("weights", "available", "words"),
    [
        (20, 10, "fits with 9 GiB of 20 GiB weights on the card, the rest streamed; 10 GiB of 11 GiB are"),
        (1, 10, "fits (2 GiB with its weights); 10 GiB of 11 GiB are available. The patch saves nothing here."),
        (1, 0.5, "does not fit (512 MiB too much even with no weights on the card)"),
        (1, 0, "needs 1 GiB besides its weights; how much memory there is is not known."),
    ],
)
def test_the_first_line_says_whether_it_fits(weights: int, available: float, words: str) -> None:
    found = text_for(call_of(other=1 << 30), weight_bytes=weights << 30, available_bytes=int(available * (1 << 30)))
    assert found.startswith(f"Flux: {words}")


def test_the_verdict_and_the_largest_size_count_the_same_memory() -> None:
    """Seven of eleven GiB are taken by others: six do not fit, however large the card is."""
    layer = trace.FfnShape("ffn", "Ffn", (1, 4096, 64), torch.float32, 6 << 30)
    first = text_for(call_of(layer), weight_bytes=2 << 30, available_bytes=4 << 30).splitlines()[0]
    assert first == (
        "Flux: does not fit (2 GiB too much even with no weights on the card) without the patch, "
        "fits (2.06 GiB with its weights) with it; 4 GiB of 11 GiB are available."
    )


def traced(shape: tuple[int, ...]) -> Any:
    """A block on ``[B, C, H, W]`` cells: what tracing it at that size gives."""
    batch, _, height, width = shape
    return follow(Block(), torch.zeros(batch, height * width, 32))


def axis_of(name: str, shape: tuple[int, ...]) -> Any:
    return next(axis for axis in estimate.axes_of([shape], None) if axis.name == name)


@either
def test_the_largest_fits_and_the_next_one_does_not(takes: bool) -> None:
    room, axis = 200 * MIB, axis_of("resolution", (1, 4, 32, 32))
    card = dataclasses.replace(CARD, ffn_budget_mib=1, ffn_tokens=64, available_bytes=room)
    found = estimate.find_largest(axis, traced(axis.now.shape), traced, card)
    assert axis.now.words == "256 x 256"
    for patched, (size, bounded) in enumerate(found):
        assert bounded
        place = axis.sizes.index(size)
        around = [traced(s.shape) for s in axis.sizes[place : place + 2]]
        inside, outside = (estimate.Figures(call, card).peaks[patched] for call in around)
        assert inside <= room < outside
    amounts = [fit.size.amount for fit in found]
    assert amounts[1] > amounts[0]


def test_where_nothing_fits_and_where_everything_does() -> None:
    axis = axis_of("batch", (1, 4, 8, 8))
    nothing, everything = (
        estimate.find_largest(axis, traced(axis.now.shape), traced, dataclasses.replace(HOST, available_bytes=room))
        for room in (10, 1 << 40)
    )
    assert [fit.size for fit in nothing] == [None] * 2
    assert set(everything) == {estimate.Fit(axis.sizes[-1], False)}
    words = text.largest_text([(axis, everything)], HOST, estimate.bisected(axis.sizes, lambda size: 2, 1))
    assert "batch (now batch of 1): as ComfyUI is batch of 256 or more; with Pascal Attention Patch" in words
    assert words.splitlines()[-1].endswith("ComfyUI's own estimate of its VAE: nothing")


def test_a_model_that_calls_other_things_at_another_size_gives_no_answer() -> None:
    axis, now = axis_of("batch", (1, 4, 8, 8)), call_of(attention_shape(64))
    for other in (
        call_of(attention_shape(128), attention_shape(128)),
        call_of(attention_shape(128, torch.float32)),
        "no",
    ):
        assert estimate.find_largest(axis, now, lambda shape, other=other: other, HOST) == []


def test_sizes_keep_the_form_of_the_latent() -> None:
    wide, frames, _ = estimate.axes_of([(1, 16, 21, 60, 104)], None)
    assert all(h % 8 == w % 8 == 0 for *_, h, w in (size.shape for size in wide.sizes))
    assert [size.amount for size in wide.sizes] == sorted({size.amount for size in wide.sizes})
    assert all(abs(size.shape[-1] / size.shape[-2] - 104 / 60) < 0.7 for size in wide.sizes)
    assert [size.words for size in frames.sizes[:3]] == ["1 frames", "5 frames", "9 frames"]
    assert [axis.name for axis in estimate.axes_of([(1, 16, 60, 104)], None)] == ["resolution", "batch"]
