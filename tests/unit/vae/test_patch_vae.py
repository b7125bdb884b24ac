"""patch_vae on real VAEs of diffusers at a tiny size: what it leaves, what it says, what it does when things fail."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from attn_support.randomness import some, times
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core import patch_vae
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.vae.windows import Convolution

diffusers = pytest.importorskip("diffusers")


def kl(**settings: Any) -> Any:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4, **settings,
    )  # fmt: skip
    return vae.eval().requires_grad_(False)


def latent(*sizes: int) -> Tensor:
    return torch.randn(sizes or (1, 4, 24, 17), generator=torch.Generator().manual_seed(1))


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_decode_and_encode_in_bands() -> None:
    vae = kl()
    picture = vae.decode(latent()).sample
    moments = vae.encode(picture).latent_dist
    with patch_vae(vae, budget_mib=0.1) as patch:
        out = vae.decode(latent(), return_dict=False)
        again = vae.encode(picture)
    assert_close(out[0], picture)
    for name in ("mean", "std", "logvar"):
        assert_close(getattr(again.latent_dist, name), getattr(moments, name))
        assert type(getattr(again.latent_dist, name)) is Tensor
    assert_close(again.latent_dist.sample(torch.Generator().manual_seed(2)),
                 moments.sample(torch.Generator().manual_seed(2)))  # fmt: skip
    decoded, encoded = patch.report().calls
    assert [(call.method, call.state) for call in (decoded, encoded)] == [(m, "on") for m in ("decode", "encode")]
    assert decoded.figures.bands > 2 * decoded.figures.layers
    assert "in bands" in patch.report().text()


def test_tiled_decoding_gives_way_and_comes_back() -> None:
    vae = kl(sample_size=16)
    vae.enable_tiling()
    tiled = vae.decode(latent()).sample
    with patch_vae(vae):
        exact = vae.decode(latent()).sample
        assert vae.use_tiling
    assert torch.equal(vae.decode(latent()).sample, tiled)
    vae.disable_tiling()
    wanted = vae.decode(latent()).sample
    assert_close(exact, wanted)
    assert (tiled - wanted).abs().max() > 1e-2


def test_deep_copies_and_pickles_are_without_the_patch() -> None:
    vae = kl()
    with patch_vae(vae, budget_mib=0.3) as patch:
        twin = copy.deepcopy(vae)
        assert_close(twin.decode(latent()).sample, vae.decode(latent()).sample)
        nn.init.zeros_(twin.decoder.conv_out.bias)
        nn.init.zeros_(twin.decoder.conv_out.weight)
        assert not twin.decode(latent()).sample.any()
        assert vae.decode(latent()).sample.any()
        stored = pickle.loads(pickle.dumps(vae))
        assert_close(stored.decode(latent()).sample, vae.decode(latent()).sample)
    assert len(patch.report().calls) == 3


def test_autocast_is_followed_whether_it_is_on_for_the_first_call_or_later() -> None:
    vae = kl()
    with patch_vae(vae, budget_mib=0.3) as patch:
        vae.decode(latent())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = vae.decode(latent()).sample
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = vae.decode(latent()).sample
    assert [call.state for call in patch.report().calls] == ["on"] * 2
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert (got - wanted).abs().max() < 0.03 * wanted.abs().max()


def _offloaded(vae: nn.Module) -> None:
    """Weights are float64 between calls of their layer, as a stand-in for another device."""
    for module in vae.modules():
        own = list(module.parameters(recurse=False))

        def load(module: nn.Module, args: Any, own: list[Any] = own) -> None:
            for parameter in own:
                parameter.data = parameter.data.float()

        def unload(module: nn.Module, args: Any, out: Any, own: list[Any] = own) -> None:
            for parameter in own:
                parameter.data = parameter.data.double()

        if own:
            unload(module, None, None)
            module.register_forward_pre_hook(load)
            module.register_forward_hook(unload)


def _layerwise(vae: Any) -> None:
    vae.enable_layerwise_casting(torch.bfloat16, torch.float32)


def _in_place(vae: Any) -> None:
    """The weight changes as by a LoRA that is merged for the time of a call."""

    def scale(by: float) -> None:
        vae.decoder.conv_in.weight.data.mul_(by)

    vae.decoder.conv_in.register_forward_pre_hook(lambda *args: scale(2.0))
    vae.decoder.conv_in.register_forward_hook(lambda *args: scale(0.5))


def _swapped_by_the_forward(vae: Any) -> None:
    """Nothing shows that the weights are others after the layer's call."""

    class Swapping(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            kept, self.weight.data = self.weight.data, self.weight.data * 2
            out = super().forward(x)
            self.weight.data = kept
            return out

    vae.decoder.conv_in.__class__ = Swapping


@pytest.mark.parametrize(
    ("host", "is_first"),
    some(itertools.product((_offloaded, _layerwise, _in_place, _swapped_by_the_forward), (True, False)), 3),
)
def test_weights_that_are_there_only_while_their_layer_runs(host: Any, is_first: bool) -> None:
    vae, other = kl(), kl()
    host(other)
    wanted = other.decode(latent()).sample
    if is_first:
        host(vae)
    with patch_vae(vae, budget_mib=0.3) as patch:
        vae.decode(latent())
        if not is_first:
            host(vae)
        assert_close(vae.decode(latent()).sample, wanted)
    assert [call.state for call in patch.report().calls] == ["on"] * 2


def test_a_weight_written_to_before_its_layer_is_computed_means_the_whole_call() -> None:
    vae = kl()
    vae.decode(latent())

    class Writing(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(2)
            out = super().forward(x)
            self.weight.mul_(0.5)
            return out

    vae.decoder.conv_in.__class__ = Writing
    wanted = vae.decode(latent()).sample
    with patch_vae(vae, verify=False) as patch, torch.no_grad():
        assert_close(vae.decode(latent()).sample, wanted)
    (call,) = patch.report().calls
    assert call.state == "refused"
    assert "changed in place while the VAE runs" in call.why


class Remembering(nn.Module):
    """A VAE with a counter, a cache in a list, a buffer, and its last result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.count, self.last, self.cache = 0, None, []
        self.register_buffer("seen", torch.zeros(3))

    def decode(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen += 1
        self.cache.append(self.conv(x * self.count))
        self.last = self.cache[-1] + (0 if self.last is None else self.last) + self.seen.view(1, 3, 1, 1)
        return self.last


@pytest.mark.parametrize("options", [{}, {"progress": lambda part: None}])
def test_trials_leave_the_vaes_own_state_alone(options: dict[str, Any]) -> None:
    """The proof, and the rehearsal that a progress bar needs."""
    x, vae, other = torch.randn(1, 3, 20, 20), Remembering().eval(), Remembering().eval()
    kept: list[Tensor] = []
    vae.conv.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad(), patch_vae(vae, budget_mib=0.01, **options) as patch:
        for _ in range(3):
            assert_close(vae.decode(x), other.decode(x))
    assert [call.state for call in patch.report().calls] == ["on"] * 3
    assert (vae.count, len(vae.cache)) == (3, 3)
    assert torch.equal(vae.seen, other.seen)
    for tensor in (vae.last, *vae.cache, kept[-1]):
        assert type(tensor) is Tensor
        tensor.numpy()
    copy.deepcopy(vae)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"vae": "vae"}, TypeError, "must be a diffusers pipeline or a torch.nn.Module, got str"),
        ({"vae": nn.Linear(1, 1)}, ValueError, "vae must have one of the methods decode, encode, got Linear"),
        ({"keep": "ram"}, ValueError, "keep must be one of auto, device, host, got 'ram'"),
        ({"when": "now"}, ValueError, "when must be 'always' or 'needed', got 'now'"),
        ({"budget_mib": 0}, ValueError, "budget_mib must be above 0 and finite, got 0"),
        ({"budget_mib": float("inf")}, ValueError, "budget_mib must be above 0 and finite, got inf"),
        ({"budget_mib": "64"}, TypeError, "budget_mib must be a number, got '64'"),
        ({"verify": 1}, TypeError, "verify must be a bool, got 1"),
        ({"progress": 7}, TypeError, "progress must be a function or None, got 7"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        patch_vae(**{"vae": kl(), **arguments})


def test_gradients_run_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    vae = kl().requires_grad_(True)
    with patch_vae(vae) as patch:
        vae.decode(latent()).sample.sum().backward()
        vae.decode(latent())
        with torch.no_grad():
            vae.decode(latent())
    assert vae.decoder.conv_in.weight.grad is not None
    assert [call.state for call in patch.report().calls] == ["off", "off", "on"]
    assert caplog.text.count("call it under torch.no_grad()") == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number: float) -> None:
    vae, z = kl(), latent()
    z[0, 0, 3, 3] = number
    wanted = vae.decode(z).sample
    with patch_vae(vae, budget_mib=0.3) as patch:
        got = vae.decode(z).sample
    assert torch.equal(got.isnan(), wanted.isnan())
    assert patch.report().calls[0].state == "on"


def _looks(vae: Any) -> None:
    """The model itself looks at the kind of what it is given, which no operator tells."""
    own = vae.decoder.forward
    vae.decoder.forward = lambda z, *args: own(z, *args) * (2 if type(z) is not Tensor else 1)


def _prints(vae: Any) -> None:
    own = vae.decoder.forward
    vae.decoder.forward = lambda z, *args: own(z, *args) if z.numpy().any() else None


def _compiles(vae: Any) -> None:
    vae.decoder.mid_block = torch.compile(vae.decoder.mid_block, backend="eager")


def _overflows(vae: Any) -> None:
    vae.decoder.conv_in.weight[0, 0, 0, 0] = float("inf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_looks, "bands differ from the VAE by"),
        (_prints, "bands failed on a small input"),
        (_compiles, "it is compiled by torch.compile"),
        (_overflows, "the VAE's own result for a small input in float32 holds NaN or infinity"),
    ],
)
@torch.no_grad()
def test_a_vae_that_cannot_be_run_in_bands_runs_as_it_is(change: Any, words: str) -> None:
    vae = kl()
    change(vae)
    wanted = vae.decode(latent()).sample
    with patch_vae(vae) as patch:
        torch.testing.assert_close(vae.decode(latent()).sample, wanted, rtol=0, atol=0, equal_nan=True)
    (call,) = patch.report().calls
    assert call.state == "refused"
    assert words in call.why
    if change is _looks:
        with patch_vae(vae, verify=False):
            assert_close(vae.decode(latent()).sample, wanted * 2)


class OutOfMemory(TorchDispatchMode):
    """The n-th operator on ordinary tensors finds no memory, once."""

    def __init__(self, place: int):
        super().__init__()
        self.place, self.count = place, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if any("__tensor_flatten__" in vars(kind) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, Tensor) and not out.is_meta:
            self.count += 1
            if self.count == self.place:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return out


def test_out_of_memory_anywhere_means_fewer_rows() -> None:
    vae, z = kl(), latent()
    with patch_vae(vae, budget_mib=0.3, keep="host") as patch:
        wanted = vae.decode(z).sample  # proven now
        with OutOfMemory(0) as counter:
            vae.decode(z)
        assert counter.count > 300
        retried, places = 0, range(1, counter.count + 1, counter.count // times(15))
        for place in places:
            with OutOfMemory(place):
                got = vae.decode(z).sample
            assert_close(got, wanted)
            figures = patch.report().calls[-1].figures
            retried += figures.retries
        assert retried > 0.6 * len(places)


def test_an_interrupt_between_bands_leaves_the_vae_usable() -> None:
    vae, seen = kl(), []

    def progress(part: float) -> None:
        seen.append(part)
        if len(seen) == 20:
            raise KeyboardInterrupt

    wanted = vae.decode(latent()).sample
    with patch_vae(vae, budget_mib=0.3, progress=progress):
        with pytest.raises(KeyboardInterrupt):
            vae.decode(latent())
        assert_close(vae.decode(latent()).sample, wanted)
    assert seen[19] < 0.5
    assert seen[-1] == 1.0
    assert seen[20:] == sorted(seen[20:])


def test_only_when_needed() -> None:
    vae, z = kl(), latent()
    wanted = vae.decode(z).sample
    with patch_vae(vae, when="needed") as patch:
        assert torch.equal(vae.decode(z).sample, wanted)
        with OutOfMemory(30):
            assert_close(vae.decode(z).sample, wanted)
    first, second = patch.report().calls
    assert (first.state, second.state, second.why) == ("off", "on", "it ran out of memory without bands")
    with patch_vae(vae, when="needed", expected_bytes=lambda method, shape, dtype: 1 << 60) as patch:
        assert_close(vae.decode(latent()).sample, wanted)
    assert "without bands it needs" in patch.report().calls[0].why


def test_too_little_host_memory_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, seen = kl(), []
    monkeypatch.setattr("pascal_attn_core.vae.calls.available_bytes", lambda device="cpu": 1 << 16)
    with (
        patch_vae(vae, keep="host", budget_mib=1, progress=seen.append),
        pytest.raises(MemoryError, match=r"decode of \[1, 4, 24, 17\] in bands needs \d+ MiB of host memory"),
    ):
        vae.decode(latent())
    assert seen == []


def test_the_budget_is_kept() -> None:
    """Bytes on the device counted one by one; what lies between layers is in host memory."""
    vae = kl()
    z = latent(1, 4, 48, 96)
    with PeakMemory() as whole:
        wanted = vae.decode(z).sample
    with patch_vae(vae, keep="host", budget_mib=1.0) as patch:
        vae.decode(z)  # proven
        with PeakMemory() as peak:
            got = vae.decode(z).sample
    assert_close(got, wanted)
    assert peak.peak_mib <= 1.0 + got.nbytes / 2**20 + 0.1
    assert peak.peak_mib < 0.4 * whole.peak_mib
    assert patch.report().calls[-1].figures.host_bytes < 1.1 * whole.peak_bytes


def test_a_pipeline_decodes_in_bands() -> None:
    """Offloaded, sliced, with our attention processor: the VAE as a pipeline holds it."""
    accelerate = pytest.importorskip("accelerate")
    from pascal_attn_core.diffusers import PascalAttnProcessor

    vae = kl()
    wanted = vae.decode(latent()).sample
    vae.set_attn_processor(PascalAttnProcessor())
    with patch_vae(vae, budget_mib=0.3) as patch:
        accelerate.cpu_offload(vae, execution_device=torch.device("cpu"))
        assert_close(vae.decode(latent()).sample, wanted)
        assert all(p.device.type == "meta" for p in vae.decoder.parameters())
    assert [call.state for call in patch.report().calls] == ["on"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_seam_is_found_before_anything_is_decoded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions whose bands lack the row above: the smallest fault that a picture would show."""
    vae, z = kl().to(dtype), latent().to(dtype)
    wanted = vae.decode(z).sample
    with patch_vae(vae, budget_mib=0.3) as patch:
        vae.decode(z)
    assert [call.state for call in patch.report().calls] == ["on"]
    own = Convolution.compute

    def without_a_row(self: Convolution, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        if dim >= 2 and low and self.weight.shape[dim] > 1:
            pieces[0] = pieces[0].clone()
            pieces[0].narrow(dim, 0, 1).zero_()
        return own(self, pieces, dim, low, high)

    monkeypatch.setattr(Convolution, "compute", without_a_row)
    with patch_vae(vae, budget_mib=0.3) as patch:
        assert torch.equal(vae.decode(z).sample, wanted)
    (call,) = patch.report().calls
    assert call.state == "refused"
