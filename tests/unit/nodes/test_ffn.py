"""Feed-forward chunking that a host takes off and puts back, and layers that bring their weights in each call."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy.stub import Patcher, StubHost, core_module, node_module
from torch import Tensor, nn

from pascal_attn_core.ffn.binding import FfnBinding
from pascal_attn_core.patching.hosts import register

WIDTH, TOKENS = 16, 96
register("fetches_weights", (__name__,))


class CastingLinear(nn.Linear):
    """As ComfyUI's layers: the weight is fetched, cast and patched within forward, through a buffer that is kept."""

    fetches_weights = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight_function: list[Any] = []
        self._buffer: Tensor | None = None
        self.cached_count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty_like(self.weight)
        self._buffer.copy_(self.weight)
        self.cached_count += 1
        address = self._buffer.data_ptr()  # as the copy from pinned memory does
        weight = self._buffer.to(x.dtype)
        for function in self.weight_function:
            weight = function(weight)
        assert self._buffer.data_ptr() == address
        return F.linear(x, weight, self.bias.to(x.dtype))


class Feed(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.w1, self.w2 = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Model(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"ffn": Feed(linear)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["ffn"](x)  # type: ignore[index]
        return x

    @property
    def ffn(self) -> Feed:
        return self.blocks[0]["ffn"]  # type: ignore[index, return-value]


def binding(**options: Any) -> FfnBinding:
    return FfnBinding(**{"chunk_tokens": 32, "min_tokens": 2, **options})


def x(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, tokens, WIDTH, dtype=dtype)


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_the_binding_that_was_attached_last_applies_until_it_is_detached(first: int) -> None:
    model, bindings = Model(), [binding(chunk_tokens=16), binding()]
    for each in bindings:
        each.attach(model)
    model(x())
    assert bindings[0].report(model).count("waiting") == 2
    assert "3 slices" in bindings[1].report(model).lines[0].why
    bindings.pop(first).detach(model)
    model(x())
    assert ("3 slices" if first == 0 else "6 slices") in bindings[0].report(model).lines[0].why
    bindings[0].detach(model)
    assert "forward" not in vars(model.ffn)


@torch.no_grad()
def test_below_another_packs_forward_it_hands_every_call_on() -> None:
    model, chunking, given = Model(), binding(), x()
    expected = model(given)
    chunking.attach(model)
    below = model.ffn.forward
    model.ffn.forward = lambda x: below(x)  # type: ignore[method-assign]
    chunking.detach(model)
    torch.testing.assert_close(model(given), expected, rtol=0, atol=0)
    model.ffn.forward = below  # as that pack puts back what it found
    chunking.attach(model)
    chunking.attach(model)
    torch.testing.assert_close(model(given), expected)
    assert "3 slices" in chunking.report(model).lines[0].why
    assert len(model.ffn.forward.sites) == 1  # type: ignore[attr-defined]


@torch.no_grad()
def test_another_forward_below_or_inside_counts_in_the_next_call() -> None:
    model, chunking, given = Model(), binding(), x()
    chunking.attach(model)
    model(given)
    plain = model.ffn.w1.forward
    model.ffn.w1.forward = lambda x: plain(x) + x.mean(dim=-2, keepdim=True).repeat(1, 1, 4)  # type: ignore[method-assign]
    out = model(given)
    assert chunking.report(model).count("refused") == 1
    chunking.detach(model)
    torch.testing.assert_close(out, model(given), rtol=0, atol=0)
    del model.ffn.w1.forward
    whole = model.ffn.forward
    model.ffn.forward = lambda x: whole(x) - x.mean(dim=-2, keepdim=True)  # type: ignore[method-assign]
    expected = model(given)
    chunking.attach(model)
    torch.testing.assert_close(model(given), expected, rtol=0, atol=0)
    assert [line.state for line in chunking.report(model).lines] == ["refused", "on"]
    chunking.detach(model)
    del model.ffn.forward
    chunking.attach(model)
    model(given)
    assert chunking.report(model).count("on") == 2


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_layers_that_cast_and_patch_their_weights_are_chunked(inference: bool) -> None:
    model, given = Model(CastingLinear).half(), x()
    noise = torch.Generator()

    def patch(weight: Tensor) -> Tensor:  # as LoRA with stochastic rounding
        return weight + torch.rand(weight.shape, generator=noise.manual_seed(1)) * 1e-2

    model.ffn.w1.weight_function.append(patch)  # type: ignore[union-attr, operator]
    with torch.inference_mode() if inference else torch.no_grad():
        expected = model(given)
        chunking = binding()
        chunking.attach(model)
        torch.testing.assert_close(model(given), expected)
        report = chunking.report(model)
    assert report.count("on") == 2, report.text()
    assert "forward" not in vars(model.ffn.w1)


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False], ids=["class", "instance"])
def test_a_casting_layer_with_code_of_another_pack_runs_whole(own: bool) -> None:
    model, given = Model(CastingLinear), x()
    layer, plain = model.ffn.w1, model.ffn.w1.forward

    def mixing(layer: Any, x: Tensor) -> Tensor:
        return CastingLinear.forward(layer, x - x.mean(dim=-2, keepdim=True))

    if own:
        mixing.__module__ = "another_pack"
        layer.__class__ = type("Mixing", (CastingLinear,), {"forward": mixing})
    else:
        layer.forward = lambda x: plain(x - x.mean(dim=-2, keepdim=True))  # type: ignore[method-assign]
    expected, chunking = model(given), binding()
    chunking.attach(model)
    torch.testing.assert_close(model(given), expected)
    assert [line.state for line in chunking.report(model).lines] == ["refused", "on"]
    chunking.detach(model)


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, KeyError])
def test_what_says_nothing_about_a_module_is_no_refusal(kind: type[Exception]) -> None:
    class Interrupted(Feed):
        trip = True

        def forward(self, x: Tensor) -> Tensor:
            if self.trip:
                raise kind("not the module's fault")
            return super().forward(x)

    model, chunking = Model(), binding()
    model.blocks[0]["ffn"] = Interrupted()  # type: ignore[index, operator]
    chunking.attach(model)
    with pytest.raises(kind):
        model(x())
    assert chunking.report(model).count("refused") == 0
    model.ffn.trip = False
    model(x())
    assert chunking.report(model).count("on") == 2


@torch.no_grad()
def test_a_patcher_that_is_collected_takes_its_slices_along(stub_host: StubHost) -> None:
    ffn, network = node_module("ffn_chunking"), Model()
    chunking = ffn.Chunking(binding(), "Model", "", None)
    patcher = Patcher.around(network)
    chunking.inject(patcher)
    assert "forward" in vars(network.ffn)
    del patcher
    gc.collect()
    assert "forward" not in vars(network.ffn)


@torch.no_grad()
def test_the_record_says_what_one_run_did(stub_host: StubHost) -> None:
    ffn, runs, network = node_module("ffn_chunking"), node_module("engine.runs"), Model()
    chunking, patcher = ffn.Chunking(binding(), "Model", "budget", "1"), Patcher.around(network)
    chunking.inject(patcher)
    none = "0 of 2 feed-forward modules chunked, 2 had no call of 2 tokens"
    for tokens, headline in ((TOKENS, "2 of 2 feed-forward modules chunked"), (1, none)):
        chunking.before_run(patcher)
        network(x(tokens))
        chunking.eject(patcher)  # as the host does before it ends a run, to take off its hooks
        chunking.inject(patcher)
        chunking.after_run(patcher)
        run = runs.remembered()[-1]
        assert (run.part, (run.gains + run.notes)[0], run.finished) == ("feed-forward", headline, True)
        assert stub_host.said[-1] == f"Model: {headline}"
    chunking.after_run(patcher)
    assert len(runs.remembered()) == 2


def test_before_a_run_the_status_counts_what_can_be_chunked_and_what_cannot() -> None:
    reports, status = core_module("ffn.report"), node_module("ffn_chunking").status
    able = reports.FfnReportLine("blocks.0.ff", "Feed", "waiting", "")
    fused = reports.FfnReportLine("single.0", "Fused", "unable", "one matrix with attention")
    assert status(reports.FfnReport([able, able, fused]), "Flux", "from 2 tokens") == (
        "2 feed-forward modules of Flux, from 2 tokens; 1 cannot be chunked (Fused)"
    )
    assert status(reports.FfnReport([fused]), "Flux", "from 2 tokens") == (
        "0 feed-forward modules of Flux can be chunked; 1 cannot be chunked (Fused)"
    )
