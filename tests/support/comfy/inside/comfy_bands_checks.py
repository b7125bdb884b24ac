"""Pascal VAE Attention, decoding and encoding in bands, inside the host: see ``comfy_checks``."""

import contextlib
import functools
import json
import re

import comfy.sd
import comfy.utils
import torch
from comfy_checks import Skip, check, close, log_lines, pack, raises, replaced, run_of
from comfy_inproc import drawn, load_vae, noise
from comfy_vae_checks import IMAGE, kl, latent, patched, vae_around

import nodes

ALWAYS, NEEDED, AS_IT_IS = "always in bands", "in bands when needed", "as it is"
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError
MIB = 1 << 20


@contextlib.contextmanager
def narrow(budget_mib=1.0):
    """So little memory for bands that the tiny models need many."""
    with replaced(pack("core.vae.calls"), "_CPU_BUDGET", int(budget_mib * MIB)):
        yield


def banded(vae, mode=ALWAYS, route="auto"):
    return patched(vae, route, decode=mode)


def in_bands(function, wanted, method):
    """Runs it, and checks the result, that it was in several bands, and that nobody was warned. Returns the run."""
    with narrow():
        run = run_of(function, wanted)
    (text,) = run.gains
    assert text.startswith(f"{method} of "), text
    layers, bands = map(int, re.search(r" (\d+) layers in (\d+) bands", text).groups())
    assert bands > layers, text
    assert run.warnings == []
    return run


@check
def decoding_in_bands_equals_the_unpatched_one_by_each_route():
    for name in ("vae_kl", "vae_flux", "vae_wan"):
        vae, samples = load_vae(name), latent(name)
        stock = vae.decode(samples)
        for route in ("auto", "tiled"):
            ours = banded(vae, route=route)
            run = in_bands(functools.partial(ours.decode, samples), stock, "decode")
            assert run.count() == run.count("taken") == (2 if name == "vae_wan" else 1), run.line()
            assert route == "auto" or set(run.routes()) == {"tiled"}, run.routes()
            assert all(kind.why == "in bands of its queries" for kind in run.tallies)


@check
def the_hosts_own_nodes_run_in_bands():
    vae = load_vae("vae_kl_full")
    ours, samples = banded(vae), {"samples": latent("vae_kl")}
    (stock,) = nodes.VAEDecode().decode(vae, samples)
    bar = []  # of the host
    with replaced(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: bar.append(value / total)):
        in_bands(lambda: nodes.VAEDecode().decode(ours, samples)[0], stock, "decode")
    assert len(bar) >= 5, bar
    assert bar == sorted(bar), bar
    assert bar[-1] == 1.0, bar
    for some in (vae, load_vae("vae_wan")):
        (stock,) = nodes.VAEEncode().encode(some, IMAGE)
        encoding = functools.partial(nodes.VAEEncode().encode, banded(some), IMAGE)
        in_bands(lambda: encoding()[0]["samples"], stock["samples"], "encode")  # noqa: B023
    mask = (torch.arange(96 * 80).reshape(1, 96, 80) % 7 > 3).float()
    (stock,) = nodes.VAEEncodeForInpaint().encode(vae, IMAGE.clone(), mask)
    inpainting = lambda: nodes.VAEEncodeForInpaint().encode(ours, IMAGE.clone(), mask)[0]["samples"]  # noqa: E731
    in_bands(inpainting, stock["samples"], "encode")


@check
def tiles_stay_tiles_and_each_is_computed_in_bands():
    vae, samples = kl()
    tiles = {"tile_x": 8, "tile_y": 8, "overlap": 2}
    stock = vae.decode_tiled(samples, **tiles)
    with narrow():
        run = run_of(lambda: banded(vae).decode_tiled(samples, **tiles), stock)
        assert 1 <= len(run.gains) <= run.count() > 2, run.gains
        # A tile fits, so that the default does nothing about it.
        assert run_of(lambda: banded(vae, NEEDED).decode_tiled(samples, **tiles), stock).gains == []


def report_of(value):
    """The text of Pascal Attention Report behind a VAE that node 1 patched."""
    report = nodes.NODE_CLASS_MAPPINGS["PascalAttentionReport"]()
    prompt = {"1": {"class_type": "PascalVAEAttention", "inputs": {}}}
    return report.report(True, value, "9", prompt)["result"][2]


@contextlib.contextmanager
def no_memory_for(vae):
    """The VAE's middle block runs out of memory when it is called for the first time."""

    def accident(module, args):
        if not failures:
            failures.append(args[0].shape)
            raise OUT_OF_MEMORY("Allocation on device")

    failures = []
    hook = vae.first_stage_model.decoder.mid.block_2.register_forward_pre_hook(accident)
    try:
        yield failures
    finally:
        hook.remove()


@check
def out_of_memory_leads_to_bands_and_not_to_the_hosts_tiles():
    vae, samples = kl()
    stock = vae.decode(samples)
    tiled = vae.decode_tiled(samples, tile_x=8, tile_y=8, overlap=2)
    raises(AssertionError, lambda: close(tiled, stock))
    ours = banded(vae, NEEDED)
    with no_memory_for(vae) as failures:
        run = in_bands(lambda: ours.decode(samples), stock, "decode")
    assert len(failures) == 1
    assert "it ran out of memory without bands" in run.gains[0]
    assert run_of(lambda: ours.decode(samples), stock).gains == []  # the next one fits


@check
def where_bands_run_out_of_memory_too_the_hosts_tiles_come():
    convolution, failures = drawn(torch.nn.Conv2d(4, 4, 1), 0.5), []

    def grown(samples):
        """A network that fails on an input of the size of a VAE's picture."""
        failures.append(type(samples).__name__)
        if samples.shape[-2] * samples.shape[-1] >= 70 * 70:
            raise OUT_OF_MEMORY("Allocation on device")
        failures.pop()
        return torch.nn.functional.interpolate(convolution(samples), scale_factor=8)

    vae, samples = vae_around(convolution, grown), noise(1, 4, 70, 70)
    stock = vae.decode(samples)
    failures.clear()
    with narrow():
        run = run_of(lambda: banded(vae, NEEDED).decode(samples), stock)
    assert failures[0] == "Tensor", failures
    assert "Banded" in failures, failures
    assert run.gains == []


@check
def a_network_that_writes_into_the_hosts_buffer_runs_in_bands():
    build = comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE
    if not getattr(build, "comfy_has_chunked_io", False):
        raise Skip("networks of this ComfyUI return what they decode")
    config = {**build.get_default_config(build, 0), "encoder_base_channels": 16, "decoder_base_channels": 16}
    config["blocks"] = [[name, 1] for name, _ in config["blocks"]]
    torch.manual_seed(0)
    network = build(version=0, config=config)
    for name, tensor in network.state_dict().items():
        is_spread = name.endswith("std-of-means") or tensor.dim() < 2
        tensor.copy_(torch.ones(tensor.shape) if is_spread else torch.randn(tensor.shape) * tensor[0].numel() ** -0.5)
    vae = comfy.sd.VAE(sd=network.state_dict(), metadata={"config": json.dumps({"vae": config})})
    samples = torch.randn(1, 128, 3, 3, 2)
    stock = vae.decode(samples)
    in_bands(lambda: banded(vae).decode(samples), stock, "decode")
    pictures = torch.rand(17, 96, 64, 3)
    in_bands(lambda: banded(vae).encode(pictures), vae.encode(pictures), "encode")


@check
def a_vae_without_attention_is_decoded_in_bands():
    import comfy.taesd.taesd

    vae = comfy.sd.VAE(sd=comfy.taesd.taesd.TAESD(None, None).state_dict())
    drawn(vae.first_stage_model, 0.05)
    samples = noise(1, 4, 24, 20)
    stock = vae.decode(samples)
    with log_lines() as lines:
        ours = banded(vae)
        assert patched(vae, decode=AS_IT_IS) is vae
    assert "has no attention; decoding and encoding always in bands" in lines[0], lines
    run = in_bands(lambda: ours.decode(samples), stock, "decode")
    assert run.count() == 0
    assert "!!" not in report_of(samples)
    assert "as it is; this VAE has no attention" in run_of(lambda: banded(vae, NEEDED).decode(samples)).line()
    assert "!!" not in report_of(samples)
