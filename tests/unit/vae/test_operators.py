"""Each operator on a banded tensor against torch's own, in bands of every size."""

import itertools
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from attn_support.randomness import some
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pascal_attn_core.vae.banded import Banded, ordinary
from pascal_attn_core.vae.lazy import NotInBands
from pascal_attn_core.vae.run import BandedRun

Function = Callable[[Tensor], Tensor]
IMAGE, VIDEO, SOUND, TOKENS = (2, 8, 7, 6), (1, 8, 4, 7, 6), (1, 8, 29), (2, 12, 8)


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_bands(
    function: Function, x: Tensor, *, rows: int | None, keep: str = "device", budget: int = 1 << 40
) -> tuple[Tensor, BandedRun]:
    run = BandedRun(x.device, budget, keep=keep, rows=rows)
    with torch.no_grad():
        out = function(Banded(run.known(x), run, x.device))
        assert isinstance(out, Banded)
        shape, dtype = out.shape, out.dtype
        got = ordinary(out)
    assert (got.shape, got.dtype) == (shape, dtype)
    return got, run


def _conv(kind: type[nn.Module], *args: int, **kwargs: object) -> Function:
    torch.manual_seed(0)
    return kind(*args, **kwargs)  # type: ignore[arg-type]


def _in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y += 1.0
    y.mul_(x)
    return F.silu(y, inplace=True)


def _attend(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
    out = F.scaled_dot_product_attention(tokens * 2, tokens + 1, tokens)
    return out.squeeze(1).transpose(1, 2).reshape(batch, channels, height, width)


def _by_hand(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    rows = x.reshape(batch, channels, -1)
    scores = torch.bmm(rows.permute(0, 2, 1), rows) * channels**-0.5
    return torch.bmm(rows, scores.softmax(-1).permute(0, 2, 1)).view(batch, channels, height, width)


def _causal_cache(x: Tensor) -> Tensor:
    """Two halves of the frames, the second with the last frames of the first: Wan's feature cache."""
    conv = _conv(nn.Conv3d, 8, 8, 3, padding=(0, 1, 1))
    first, second = x[:, :, :2], x[:, :, 2:]
    cache = first[:, :, -2:].clone()
    first = conv(F.pad(first, (0, 0, 0, 0, 2, 0)))
    return torch.cat([first, conv(torch.cat([cache, second], 2))], 2)


CASES: dict[str, tuple[tuple[int, ...], Function]] = {
    "conv": (IMAGE, _conv(nn.Conv2d, 8, 5, 3, padding=1)),
    "conv of a conv": (IMAGE, lambda x: _conv(nn.Conv2d, 8, 4, 5, padding=2)(_conv(nn.Conv2d, 8, 8, 3, padding=1)(x))),
    "conv stride 2, padded on one side": (IMAGE, lambda x: _conv(nn.Conv2d, 8, 5, 3, stride=2)(F.pad(x, (0, 1, 0, 1)))),
    "conv dilated in groups": (IMAGE, _conv(nn.Conv2d, 8, 8, 3, padding=2, dilation=2, groups=4)),
    "conv without bias": (IMAGE, _conv(nn.Conv2d, 8, 5, 3, bias=False)),
    "conv reflect": (IMAGE, _conv(nn.Conv2d, 8, 5, 3, padding=1, padding_mode="reflect")),
    "conv replicate": (IMAGE, _conv(nn.Conv2d, 8, 5, 5, padding=2, padding_mode="replicate")),
    "conv circular": (IMAGE, _conv(nn.Conv2d, 8, 5, 3, padding=1, padding_mode="circular")),
    "conv wider than the picture": (IMAGE, _conv(nn.Conv2d, 8, 5, 3, padding=9, dilation=9)),
    "conv transposed": (IMAGE, _conv(nn.ConvTranspose2d, 8, 5, 3, stride=2, padding=1, output_padding=1)),
    "conv transposed, 4 of 2": (IMAGE, _conv(nn.ConvTranspose2d, 8, 5, 4, stride=2, padding=1)),
    "conv 3d": (VIDEO, _conv(nn.Conv3d, 8, 5, 3, padding=1)),
    "conv 1d dilated": (SOUND, _conv(nn.Conv1d, 8, 5, 7, padding=9, dilation=3)),
    "conv 1d transposed": (SOUND, _conv(nn.ConvTranspose1d, 8, 5, 8, stride=4, padding=2)),
    "conv with a weight of one call": (IMAGE, lambda x: F.conv2d(x, seeded(5, 8, 3, 3), padding=1)),
    "group norm": (IMAGE, _conv(nn.GroupNorm, 4, 8)),
    "group norm without weights": (VIDEO, _conv(nn.GroupNorm, 8, 8, affine=False)),
    "group norm of tokens": (IMAGE, lambda x: _conv(nn.GroupNorm, 4, 8)(x.flatten(2)).view(x.shape)),
    "residual block": (
        IMAGE,
        lambda x: x + _conv(nn.Conv2d, 8, 8, 3, padding=1)(F.silu(_conv(nn.GroupNorm, 4, 8)(x))) / 1.5,
    ),
    "batch norm": (IMAGE, nn.Sequential(nn.BatchNorm2d(8)).eval()),
    "layer norm over channels": (IMAGE, lambda x: F.layer_norm(x.movedim(1, -1), (8,)).movedim(-1, 1)),
    "rms norm": (IMAGE, lambda x: F.rms_norm(x.movedim(1, -1), (8,), eps=1e-6).movedim(-1, 1)),
    "wan's norm": (VIDEO, lambda x: F.normalize(x, dim=1) * 8**0.5 * seeded(8, 1, 1, 1)),
    "pixel norm": (VIDEO, lambda x: x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()),
    "mean over channels": (IMAGE, lambda x: x.mean(1) - x.std(1)),
    "softmax over channels": (IMAGE, lambda x: x.softmax(1)),
    "nearest": (IMAGE, lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")),
    "nearest exact to a size": (IMAGE, lambda x: F.interpolate(x, size=(21, 12), mode="nearest-exact")),
    "nearest, then conv": (
        IMAGE,
        lambda x: _conv(nn.Conv2d, 8, 5, 3, padding=1)(F.interpolate(x, scale_factor=2.0)),
    ),
    "bilinear": (IMAGE, lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    "bicubic": (IMAGE, lambda x: F.interpolate(x, scale_factor=3.0, mode="bicubic")),
    "trilinear": (VIDEO, lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear")),
    "average pool": ((1, 8, 12, 6), lambda x: F.avg_pool2d(x, 2)),
    "max pool": ((1, 8, 12, 6), lambda x: F.max_pool2d(x, 3)),
    "pixel shuffle": (IMAGE, lambda x: F.pixel_shuffle(x, 2)),
    "pixel unshuffle": ((2, 8, 12, 6), lambda x: F.pixel_unshuffle(x * 2, 3)),
    "patches": ((1, 8, 12, 6), lambda x: (x * 2).view(1, 8, 6, 2, 3, 2).permute(0, 1, 3, 5, 2, 4).reshape(1, 32, 6, 3)),
    "chunks of channels": (IMAGE, lambda x: torch.cat([part * place for place, part in enumerate(x.chunk(4, 1))], 1)),
    "halves one upon the other": (IMAGE, lambda x: torch.cat([x, x + 1], 2)),
    "stack and select": (IMAGE, lambda x: torch.stack([x, x * 2, x.abs()], 1)[:, 1] - x),
    "unbind frames": (VIDEO, lambda x: torch.stack(list((x + 1).unbind(2))[::-1], 2)),
    "every second row": (IMAGE, lambda x: (x + 1)[:, :, 1::2]),
    "repeat frames": (VIDEO, lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], 2)),
    "repeat interleave": (VIDEO, lambda x: (x + 1).repeat_interleave(2, dim=2)),
    "expand": (IMAGE, lambda x: x.mean(2, keepdim=True).expand(x.shape) + x),
    "pad and crop": (IMAGE, lambda x: F.pad(x + 1, (1, 2, -1, 3), value=2.0)),
    "edges reflected": (IMAGE, lambda x: F.pad(x * 2, (2, 1, 3, 2), mode="reflect")),
    "edges repeated": (VIDEO, lambda x: F.pad(x, (1, 2, 3, 0, 2, 1), mode="replicate")),
    "channel scale": (IMAGE, lambda x: x * seeded(8, 1, 1) + seeded(7, 1)),
    "swish of a shared value": (IMAGE, lambda x: (lambda y: y * y.sigmoid())(_conv(nn.GroupNorm, 4, 8)(x))),
    "swish after swish": (IMAGE, lambda x: reduce(lambda y, _: y * y.sigmoid() + x, range(40), x)),
    "in place": (IMAGE, _in_place),
    "in place after a pad": (IMAGE, lambda x: F.pad(x, (0, 0, 2, 2)).add_(1.0) + F.pad(x, (0, 0, 2, 2)).relu_()),
    "zeros like": (IMAGE, lambda x: torch.zeros_like(x).add_(x) + torch.full_like(x, 2.0)),
    "copied into": (IMAGE, lambda x: torch.empty_like(x).copy_(x * 3)),
    "other dtype and back": (IMAGE, lambda x: x.to(torch.float64).exp().to(torch.float32)),
    "einsum": (IMAGE, lambda x: torch.einsum("bchw,dc->bdhw", x, seeded(5, 8))),
    "linear of tokens": (TOKENS, _conv(nn.Linear, 8, 5)),
    "linear of folded tokens": ((1, 12, 8), lambda x: torch.addmm(seeded(5), x.view(12, 8), seeded(8, 5))),
    "attention": (IMAGE, _attend),
    "attention by hand": (IMAGE, _by_hand),
    "frames as batch": (
        VIDEO,
        lambda x: _conv(nn.Conv2d, 8, 8, 3, padding=1)(
            _conv(nn.GroupNorm, 2, 8)(x.permute(0, 2, 1, 3, 4).reshape(4, 8, 7, 6))
        ).view(1, 4, 8, 7, 6),
    ),
    "feature cache": (VIDEO, _causal_cache),
}  # fmt: skip


@pytest.mark.parametrize(("name", "rows"), some(itertools.product(CASES, (1, 2, 3, None)), 3))
def test_bands_are_the_whole(name: str, rows: int | None) -> None:
    shape, function = CASES[name]
    x = seeded(*shape)
    with torch.no_grad():
        wanted = function(x.clone())
    got, run = in_bands(function, x.clone(), rows=rows, keep="host" if rows == 2 else "device")
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    assert not run.figures.whole
    if rows == 1 and name not in ("expand",):
        assert run.figures.bands > run.figures.layers


@given(st.data())
def test_any_convolution(data: st.DataObject) -> None:
    """Whatever its sizes; bands of any number of rows."""

    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    transposed = data.draw(st.booleans())
    kernel, stride, dilation = draw(1, 5), draw(1, 3), draw(1, 3)
    reach = dilation * (kernel - 1)
    padding = draw(0, min(reach, 6) if transposed else 6)
    height = draw(max(1, reach + 1 - 2 * padding), reach + 12)
    x, rows = seeded(1, 4, height, 5), draw(1, 6)
    if transposed:
        extra = draw(0, max(stride, dilation) - 1)
        weight = seeded(4, 3, kernel, 1)
        if (height - 1) * stride - 2 * padding + reach + extra + 1 <= 0:
            return

        def function(x: Tensor) -> Tensor:
            return F.conv_transpose2d(x, weight, None, (stride, 1), (padding, 0), (extra, 0), 1, (dilation, 1))
    else:
        weight = seeded(6, 2, kernel, 1)

        def function(x: Tensor) -> Tensor:
            return F.conv2d(x, weight, seeded(6), (stride, 1), (padding, 0), (dilation, 1), 2)

    got, _ = in_bands(function, x, rows=rows)
    torch.testing.assert_close(got, function(x), rtol=1e-4, atol=1e-4)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from(["device", "host"]))
def test_a_decoder_of_any_size(height: int, width: int, rows: int, keep: str) -> None:
    torch.manual_seed(0)
    decoder = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Upsample(scale_factor=2.0),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1),
    )  # fmt: skip
    x = seeded(1, 4, height, width)
    with torch.no_grad():
        wanted = decoder(x)
    got, run = in_bands(decoder, x, rows=rows, keep=keep)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert (run.figures.host_bytes > 0) == (keep == "host")


def test_an_unknown_operator_runs_whole_and_is_named() -> None:
    x = seeded(*IMAGE)
    got, run = in_bands(lambda x: (x * 2).flip(2) + 1, x, rows=1)
    torch.testing.assert_close(got, (x * 2).flip(2) + 1)
    assert run.figures.whole == {"flip": 1}


def test_random_numbers_are_those_of_the_whole() -> None:
    def function(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.randn_like(x)

    x = seeded(*IMAGE)
    got, _ = in_bands(function, x, rows=2)
    torch.testing.assert_close(got, function(x))


def test_writing_where_a_view_is_in_use_is_refused() -> None:
    run = BandedRun(torch.device("cpu"), 1 << 30)
    x = Banded(run.known(seeded(*IMAGE)), run, torch.device("cpu"))
    y = x + 1
    row = y[:, :, 0]
    with pytest.raises(NotInBands, match="add_ changes a tensor of which a view is in use"):
        y.add_(1.0)
    del row
    y.add_(1.0)
    torch.testing.assert_close(ordinary(y), seeded(*IMAGE) + 2)


@pytest.mark.parametrize(
    ("dtype", "spread", "mean"), [(torch.float32, 1e-2, 100), (torch.bfloat16, 3, 20), (torch.float16, 3, 20)]
)
def test_sums_of_a_group_norm_are_as_near_to_float64_as_torchs_own(
    dtype: torch.dtype, spread: float, mean: int
) -> None:
    """Gathered in float32, although the mean is many times as large as the differences."""
    norm = nn.GroupNorm(4, 8).to(dtype)
    x = (seeded(1, 8, 64, 64) * spread + mean).to(dtype)
    exact = F.group_norm(x.double(), 4)
    got, _ = in_bands(lambda x: norm(x) * 1, x, rows=3)
    with torch.no_grad():
        own = (norm(x).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= (2 if dtype == torch.float32 else 1.01) * own + 1e-6


class Delayed:
    """Copies that are made when somebody waits for them and not before; until then NaN is there."""

    def __init__(self) -> None:
        self.going: list[tuple[Tensor, Tensor]] = []
        self.sent = self.most = 0

    def fetch(self, piece: Tensor, dim: int) -> Tensor:
        return piece.clone()

    def send(self, piece: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        self.sent += 1
        return torch.full_like(piece, torch.nan), piece

    def arrived(self, sent: tuple[Tensor, Tensor]) -> Tensor:
        return sent[0].copy_(sent[1])

    def store(self, piece: Tensor, place: Tensor, dim: int) -> None:
        place.fill_(torch.nan)
        self.going.append((piece.clone(), place))
        self.most = max(self.most, len(self.going))

    def settle(self) -> None:
        for piece, place in self.going:
            place.copy_(piece)
        self.going.clear()


@pytest.mark.parametrize("name", ["residual block", "group norm of tokens", "attention", "bicubic", "conv reflect"])
def test_copies_beside_the_computation_are_waited_for(name: str) -> None:
    shape, function = CASES[name]
    x, queues = seeded(*shape), Delayed()
    run = BandedRun(x.device, 1 << 40, keep="host", rows=2, queues=queues)
    with torch.no_grad():
        got = ordinary(function(F.silu(_conv(nn.Conv2d, 8, 8, 3)(Banded(run.known(x), run, x.device)))))
        wanted = function(F.silu(_conv(nn.Conv2d, 8, 8, 3)(x)))
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    if name == "residual block":
        assert queues.sent > 3
        assert queues.most > 1
