"""Decoding and encoding of a VAE in bands, as the node puts it between ComfyUI and a network, without ComfyUI."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy.stub import StubHost, core_module, make_engine, node_module, vae_attention
from torch import Tensor, nn

bands, attention, scopes = map(node_module, ("patches.bands", "patches.replacements", "patches.override"))
calls = core_module("vae.calls")
pytestmark = pytest.mark.usefixtures("stub_host", "bars")
ALWAYS, NEEDED = bands.ALWAYS, bands.NEEDED


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Mock]:
    """ComfyUI's progress bars, with their numbers of steps; bands are narrow."""
    monkeypatch.setattr(calls, "_CPU_BUDGET", 1 << 16)
    made: list[Mock] = []
    host = node_module("comfy.host")
    monkeypatch.setattr(host, "progress_bar", lambda steps: made.append(Mock(steps=steps)) or made[-1])
    return made


class Network(nn.Module):
    """``[B, 4, H, W]`` -> ``[B, 3, 2H, 2W]``, with an attention block; ``fails`` is called first of all."""

    def __init__(self, fails: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.attend, self.fails = nn.GroupNorm(2, 8), vae_attention, fails
        self.requires_grad_(False)

    def decode(self, samples: Tensor, output_buffer: Tensor | None = None) -> Tensor:
        x = self.norm(self.first(samples))
        self.fails(x)
        x = x + self.attend(x, x * 2, x + 1)
        x = self.last(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        if output_buffer is None:
            return x
        output_buffer.copy_(x)
        return output_buffer


SAMPLES = torch.randn(1, 4, 24, 20, generator=torch.Generator().manual_seed(1))


def banded(network: Network, mode: str, estimate: Any = None) -> tuple[Callable[..., Tensor], Any]:
    """Return the network's ``decode`` as the node replaces it, and the engine."""
    engine = make_engine(route="tiled")
    engine.part = "VAE"
    network.attend = attention.channels_first(engine, scopes.Scope(), "mid", vae_attention)
    return bands.InBands(engine, network, "decode", mode, estimate, network.decode), engine


def test_always_in_bands_it_gives_the_same_and_counts_one_attention_call(bars: list[Mock]) -> None:
    network = Network()
    stock = network.decode(SAMPLES)
    decode, engine = banded(network, ALWAYS)
    torch.testing.assert_close(decode(SAMPLES), stock)
    (text,) = engine.run.gains
    assert text.startswith("decode of 1x4x24x20 in bands: ")
    assert "expected whole" not in text
    ((kind, tally),) = engine.run.tallies.items()
    assert (kind.block, kind.route, kind.query, tally.count) == ("mid", "tiled", (1, 1, 480, 8), 1)
    (bar,) = bars
    seen = [update.args[0] for update in bar.update_absolute.call_args_list]
    assert seen == sorted(seen)
    assert seen[-1] == bar.steps
    decode(SAMPLES)
    assert len(bars) == 2  # a bar for each call


@pytest.mark.parametrize("estimate", [lambda shape, dtype: 1000, lambda shape, dtype: shape[7]])
def test_when_needed_it_is_as_it_is_while_it_fits(bars: list[Mock], estimate: Any) -> None:
    network = Network()
    decode, engine = banded(network, NEEDED, estimate)
    assert decode(SAMPLES).equal(network.decode(SAMPLES))
    assert engine.run.gains == []
    assert bars == []


def test_host_memory_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = MemoryError("decode in bands needs 7 MiB of host memory")
    monkeypatch.setattr(bands.PatchedMethod, "__call__", Mock(side_effect=missing))
    network = Network()
    stock = network.decode(SAMPLES)
    with pytest.raises(MemoryError, match="needs 7 MiB of host memory"):
        banded(network, ALWAYS)[0](SAMPLES)
    decode, engine = banded(network, NEEDED)
    torch.testing.assert_close(decode(SAMPLES), stock)
    assert engine.run.warnings == ["decode in bands needs 7 MiB of host memory; it runs as it is instead"]


def test_what_cannot_run_in_bands_runs_as_it_is_and_is_named() -> None:
    network = Network(lambda x: x.numpy())
    stock = network.decode(SAMPLES)
    decode, engine = banded(network, ALWAYS)
    torch.testing.assert_close(decode(SAMPLES), stock)
    assert engine.run.gains == []
    assert any("decode cannot run in bands: " in text for text in engine.run.warnings)


@pytest.mark.parametrize("look", [1, 20])
def test_cancel_ends_it_after_a_band(stub_host: StubHost, look: int) -> None:
    class Cancelled(Exception):
        """ComfyUI's exception up to 0.8 is like this."""

    network = Network()
    stock = network.decode(SAMPLES)
    decode, _ = banded(network, ALWAYS)
    decode(SAMPLES)
    stub_host.interrupt, stub_host.at_look = Cancelled(), stub_host.looks + look
    with pytest.raises(Cancelled):
        decode(SAMPLES)
    assert stub_host.looks == stub_host.at_look
    stub_host.interrupt = None
    torch.testing.assert_close(decode(SAMPLES), stock)


def test_cancel_is_not_lost_where_the_network_swallows_whatever_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swallowing(Network):
        def decode(self, samples: Tensor, output_buffer: Tensor | None = None) -> Tensor:
            x = self.first(samples)
            for _ in range(2):
                try:  # as ComfyUI's upsampling, for formats that it lacks
                    x = F.interpolate(x, scale_factor=2.0, mode="nearest")
                except:  # noqa: E722
                    x = x + 1
            return self.last(x)

    looks: list[int] = []

    def cancelled_once() -> None:  # ComfyUI raises it, and has forgotten it
        looks.append(1)
        if len(looks) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(node_module("comfy.host"), "throw_if_interrupted", cancelled_once)
    at = 0
    decode, _ = banded(Swallowing(), ALWAYS)
    decode(SAMPLES)
    looks.clear()
    decode(SAMPLES)
    for at in (1, len(looks) // 3, len(looks) // 2, len(looks)):  # noqa: B007
        looks.clear()
        with pytest.raises(KeyboardInterrupt):
            decode(SAMPLES)


def test_a_network_that_writes_into_a_buffer_does_not_do_so_when_it_is_only_tried() -> None:
    sizes: list[tuple[str, tuple[int, ...]]] = []
    network = Network(lambda x: sizes.append((type(x).__name__, tuple(x.shape[-2:]))))
    stock = network.decode(SAMPLES)
    sizes.clear()
    decode, engine = banded(network, ALWAYS)
    buffer = torch.full_like(stock, 7.0)
    assert decode(SAMPLES, output_buffer=buffer) is buffer
    torch.testing.assert_close(buffer, stock)
    assert ("Tensor", (24, 20)) not in sizes  # tried on a smaller one
    assert any(size != (24, 20) for _, size in sizes)
    assert len(engine.run.gains) == 1
