"""``python tools/vae_table_comfyui.py``: the VAEs of ComfyUI in bands, as a table.

It runs in ComfyUI's interpreter, on a checkout that ``--host`` or ``COMFYUI_PATH`` names. The classes are ComfyUI's own
at a tiny size with random weights; each decodes and encodes as it is and in bands, and the two are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLUMNS = ("family", "method", "input", "outcome", "difference", "rounding", "peak", "in bands", "of which whole")


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        name: of the models that have this VAE.
        build: makes the network.
        latent, picture: shapes of the inputs of decode and encode, None where the class lacks the method.
        note: what a reader should know.
    """

    name: str
    build: Callable[[], Any]
    latent: tuple[int, ...] | None
    picture: tuple[int, ...] | None
    note: str = ""


FAMILIES: list[Family] = []


def family(name: str, latent: tuple[int, ...] | None, picture: tuple[int, ...] | None, note: str = "") -> Any:
    """Adds a family whose network the decorated function builds."""

    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        FAMILIES.append(Family(name, build, latent, picture, note))
        return build

    return add


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"comfy.{module}"), name)


def _kl(**more: Any) -> dict[str, Any]:
    shape = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32}
    return {**shape, "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, **more}


def _engine(
    encoder: str, decoder: str, config: dict[str, Any], regularizer: str = "DiagonalGaussian", **more: Any
) -> Any:
    return _class("ldm.models.autoencoder", "AutoencodingEngine")(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}Regularizer"},
        encoder_config={"target": f"comfy.ldm.{encoder}", "params": config},
        decoder_config={"target": f"comfy.ldm.{decoder}", "params": {**config, **more}},
    )


_PICTURE_LATENT, _PICTURE = (1, 4, 13, 11), (1, 3, 52, 44)


@family("SD 1.5, SDXL", _PICTURE_LATENT, _PICTURE)
def _sd() -> Any:
    return _class("ldm.models.autoencoder", "AutoencoderKL")(ddconfig=_kl(), embed_dim=4)


@family("SD3, Flux", (1, 16, 13, 11), _PICTURE)
def _flux() -> Any:
    model = "modules.diffusionmodules.model"
    return _engine(f"{model}.Encoder", f"{model}.Decoder", _kl(z_channels=16))


@family("Flux 2", (1, 16, 7, 5), (1, 3, 56, 40))
def _flux2() -> Any:
    return _class("ldm.models.autoencoder", "AutoencoderKL")(ddconfig=_kl(batch_norm_latent=True), embed_dim=4)


@family("Stable Video Diffusion", (3, 4, 9, 7), (3, 3, 36, 28))
def _svd() -> Any:
    video = {"video_kernel_size": [3, 1, 1], "alpha": 0.0}
    return _engine("modules.diffusionmodules.model.Encoder", "modules.temporal_ae.VideoDecoder", _kl(), **video)


@family("TAESD", _PICTURE_LATENT, (1, 3, 104, 88))
def _taesd() -> Any:
    return _class("taesd.taesd", "TAESD")(latent_channels=4)


@family("TAEHV (Wan 2.1)", (1, 16, 3, 8, 6), (1, 3, 9, 64, 48))
def _taehv() -> Any:
    return _class("taesd.taehv", "TAEHV")(latent_channels=16)


@family("TAEHV (Wan 2.2)", (1, 48, 3, 6, 4), (1, 3, 9, 96, 64))
def _taehv22() -> Any:
    return _class("taesd.taehv", "TAEHV")(latent_channels=48)


@family("Stable Cascade, stage A", (1, 4, 13, 11), _PICTURE)
def _stage_a() -> Any:
    return _class("ldm.cascade.stage_a", "StageA")(bottleneck_blocks=2, c_hidden=64, codebook_size=64)


@family("Stable Cascade, stage C", (1, 16, 5, 3), (1, 3, 128, 96))
def _stage_c() -> Any:
    return _class("ldm.cascade.stage_c_coder", "StageC_coder")()


_VIDEO_LATENT, _VIDEO = (1, 16, 3, 8, 6), (1, 3, 9, 64, 48)


@family("Wan 2.1, Qwen-Image", _VIDEO_LATENT, _VIDEO)
def _wan() -> Any:
    depth = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return _class("ldm.wan.vae", "WanVAE")(dim=16, z_dim=16, **depth)


@family("Wan 2.2", (1, 48, 3, 4, 6), (1, 3, 9, 64, 96))
def _wan22() -> Any:
    depth = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return _class("ldm.wan.vae2_2", "WanVAE")(dim=16, dec_dim=16, z_dim=48, **depth)


def _ltx(version: int) -> Any:
    build = _class("ldm.lightricks.vae.causal_video_autoencoder", "VideoVAE")
    config = (build.get_default_config if hasattr(build, "get_default_config") else build.guess_config)(build, version)
    config = {**config, "encoder_base_channels": 16, "decoder_base_channels": 16}
    for side in ("blocks", "encoder_blocks", "decoder_blocks"):
        if side in config:
            config[side] = [[name, _one_layer(how)] for name, how in config[side]]
    return build(version=version, config=config)


def _one_layer(how: Any) -> Any:
    return (
        {**how, "num_layers": 1}
        if isinstance(how, dict) and "num_layers" in how
        else min(how, 1)
        if type(how) is int
        else how
    )


_LTX_LATENT, _LTX_VIDEO = (1, 128, 3, 3, 2), (1, 3, 17, 96, 64)


@family("LTX-Video 0.9", _LTX_LATENT, _LTX_VIDEO)
def _ltx0() -> Any:
    return _ltx(0)


@family("LTX-Video 0.9.1", _LTX_LATENT, _LTX_VIDEO)
def _ltx1() -> Any:
    return _ltx(1)


@family("LTX-Video 0.9.5", _LTX_LATENT, _LTX_VIDEO)
def _ltx2() -> Any:
    return _ltx(2)


_HUNYUAN = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 1}


@family("HunyuanVideo", (1, 4, 3, 8, 6), (1, 3, 9, 32, 24))
def _hunyuan_video() -> Any:
    return _class("ldm.models.autoencoder", "AutoencoderKL")(ddconfig=_kl(conv3d=True, time_compress=4), embed_dim=4)


@family("HunyuanImage 2.1", (1, 16, 9, 7), (1, 3, 36, 28))
def _hunyuan_image() -> Any:
    config = {**_HUNYUAN, "block_out_channels": [32, 64, 64], "ffactor_spatial": 4, "z_channels": 16}
    return _engine("hunyuan_video.vae.Encoder", "hunyuan_video.vae.Decoder", config)


def _refiner(*, is_refiner: bool) -> Any:
    config = {**_HUNYUAN, "block_out_channels": [32, 64, 64], "ffactor_spatial": 4, "ffactor_temporal": 4}
    config |= {"z_channels": 16, "refiner_vae": is_refiner}
    regularizer = "Empty" if is_refiner else "DiagonalGaussian"
    return _engine("hunyuan_video.vae_refiner.Encoder", "hunyuan_video.vae_refiner.Decoder", config, regularizer)


@family("HunyuanVideo 1.5", (1, 16, 3, 6, 5), (1, 3, 9, 24, 20))
def _hunyuan15() -> Any:
    return _refiner(is_refiner=True)


@family("HunyuanImage refiner", (1, 16, 1, 6, 5), (1, 3, 1, 24, 20))
def _hunyuan_refiner() -> Any:
    return _refiner(is_refiner=False)


@family("CogVideoX", (1, 16, 3, 6, 5), (1, 3, 9, 48, 40))
def _cogvideox() -> Any:
    build = _class("ldm.cogvideo.vae", "AutoencoderKLCogVideoX")
    return build(block_out_channels=(32, 32, 32, 64), layers_per_block=1, groups=8)


@family("Mochi", (1, 12, 3, 5, 4), (1, 3, 13, 40, 32), "at its published width")
def _mochi() -> Any:
    return _class("ldm.genmo.vae.model", "VideoVAE")()


@family("Cosmos", (1, 16, 3, 6, 5), (1, 3, 9, 64, 48))
def _cosmos() -> Any:
    config = {"z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 64, "in_channels": 3}
    config |= {"out_channels": 3, "channels": 16, "channels_mult": [2, 4, 4], "num_res_blocks": 1, "dropout": 0.0}
    config |= {"attn_resolutions": [32], "patch_size": 4, "num_groups": 1, "temporal_compression": 8}
    return _class("ldm.cosmos.vae", "CausalContinuousVideoTokenizer")(**config, spacial_compression=8)


@family("Stable Audio", (1, 16, 24), (1, 2, 4096))
def _oobleck() -> Any:
    return _class("ldm.audio.autoencoder", "AudioOobleckVAE")(channels=8, latent_dim=16)


@family("Stable Audio 3", (1, 256, 24), (1, 2, 65536))
def _stable_audio3() -> Any:
    return _class("ldm.audio.vae_sa3", "SA3AudioVAE")(channels=64, transformer_depths=1, sinusoidal_blocks=0)


@family("ACE-Step", (1, 8, 16, 24), (1, 2, 32768), "vocoder at its published width")
def _ace() -> Any:
    blocks = {"encoder_block_out_channels": (32, 64, 64, 64), "decoder_block_out_channels": (32, 64, 64, 64)}
    layers = {"encoder_layers_per_block": (1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1)}
    return _class("ldm.ace.vae.music_dcae_pipeline", "MusicDCAE")(44100, dcae_config={**blocks, **layers})


@family("MMAudio", (1, 20, 12), (1, 2, 44100), "at its published width")
def _mmaudio() -> Any:
    return _class("ldm.mmaudio.vae.autoencoder", "AudioAutoencoder")(mode="16k")


@family("Mage-Flow", (1, 128, 6, 4), (1, 3, 96, 64), "at its published width")
def _mage() -> Any:
    return _class("ldm.mage_flow.vae", "MageVAE")()


@family("SeedVR2", (1, 16, 2, 5, 4), (1, 3, 5, 40, 32), "at its published width")
def _seedvr() -> Any:
    return _class("ldm.seedvr.vae", "VideoAutoencoderKLWrapper")()


@family("MiniMax H3 sound", (1, 32, 2, 12), (1, 2, 16000))
def _minimax_audio() -> Any:
    return _class("ldm.minimax.audio_vae", "MiniMaxH3AudioVAE")(encoder_dim=8, latent_dim=256, decoder_dim=128)


@family("pixel space", (1, 3, 24, 16), (1, 3, 24, 16))
def _pixels() -> Any:
    return _class("pixel_space_convert", "PixelspaceConversionVAE")()


# ---- running them ----------------------------------------------------------------------------------------------------


def with_random_weights(network: Any, seed: int = 0) -> Any:
    """The network with weights under which no layer fades or explodes."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Any) -> Any:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    with torch.no_grad():
        for name, tensor in network.named_parameters():
            last = name.rpartition(".")[2]
            if tensor.dim() >= 2 and math.prod(tensor.shape[1:]) > 1:
                tensor.copy_(normal(tensor) / math.sqrt(math.prod(tensor.shape[1:])))
            elif last in ("weight", "gamma", "alpha", "beta", "original0", "weight_g"):
                tensor.copy_(1 + 0.1 * normal(tensor))
            else:
                tensor.copy_(0.1 * normal(tensor))
        for name, tensor in network.named_buffers():
            if tensor.is_floating_point() and name.rpartition(".")[2] in (
                "mean-of-means",
                "latents_mean",
                "running_mean",
            ):
                tensor.copy_(0.1 * normal(tensor))
            elif tensor.is_floating_point() and name.rpartition(".")[2] in (
                "std-of-means",
                "latents_std",
                "running_var",
            ):
                tensor.copy_(1 + 0.1 * normal(tensor).abs())
    return network.eval().requires_grad_(False)


def cast_on_every_call(network: Any) -> None:
    """As ComfyUI does with weights that are not on the device: each call is given copies of them."""
    for module in network.modules():
        if hasattr(module, "comfy_cast_weights"):
            module.comfy_cast_weights = True
            module.weight_function = [lambda weight: weight.clone()]
            module.bias_function = [lambda bias: bias.clone()]


@dataclass
class Row:
    """Result of one method of one family."""

    family: str
    method: str
    shape: tuple[int, ...]
    outcome: str
    difference: float | None = None
    rounding: float | None = None
    peak: float | None = None
    peak_in_bands: float | None = None
    whole: str = ""

    @property
    def is_exact(self) -> bool:
        return self.outcome == "exact"

    def cells(self) -> list[str]:
        numbers = [f"{value:.1e}" if value is not None else "" for value in (self.difference, self.rounding)]
        peaks = [f"{value:.1f}" if value is not None else "" for value in (self.peak, self.peak_in_bands)]
        shape = "x".join(map(str, self.shape))
        return [self.family, self.method, shape, self.outcome, *numbers, *peaks, self.whole]


def measured(function: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a call, and the MiB that it had at most."""
    from pascal_attn_core.observe.memory import PeakMemory

    with PeakMemory("cpu") as peak:
        out = function()
    return out, peak.peak_bytes / 2**20


def _given(found: Family, method: str, generator: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and numbers of a method's input."""
    import torch

    shape = found.latent if method == "decode" else found.picture
    assert shape is not None
    if method == "decode":
        return shape, torch.randn(shape, generator=generator)
    return shape, torch.rand(shape, generator=generator) * 2 - 1


def compare(found: Family, method: str, dtype: Any, *, casts: bool, budget_mib: float) -> Row:
    """One method of one family as it is and in bands."""
    import torch

    from pascal_attn_core.vae import patch_vae

    generator = torch.Generator().manual_seed(1)
    shape, given = _given(found, method, generator)
    network = with_random_weights(found.build())
    exact = _exact(network, method, given, dtype)
    network = network.to(dtype)
    given = given.to(dtype)
    if casts:
        cast_on_every_call(network)
    torch.manual_seed(2)
    stock, peak = measured(lambda: getattr(network, method)(given.clone()))
    torch.manual_seed(2)
    if not bool(stock.isfinite().all()):
        return Row(found.name, method, tuple(shape), "ComfyUI itself: gives NaN or infinity with these weights")
    signs = torch.sign(torch.randn(shape, generator=generator)).to(dtype)
    moved = getattr(network, method)(given * (1 + torch.finfo(dtype).eps / 2 * signs))
    with patch_vae(network, budget_mib=budget_mib, methods=(method,)) as patch:
        getattr(network, method)(given.clone())  # the proof, so that it is not measured
        torch.manual_seed(2)
        out, peak_in_bands = measured(lambda: getattr(network, method)(given.clone()))
        call = patch.report().calls[-1]
    row = Row(found.name, method, tuple(shape), "", peak=peak)
    if call.state != "in bands":
        row.outcome = f"refused: {call.why}"
        return row
    scale = max(float(stock.float().abs().max()), 1e-30)
    row.difference = float((out.double() - stock.double()).abs().max()) / scale
    others = (moved,) if exact is None else (moved, exact)
    row.rounding = max(float((stock.double() - other.double()).abs().max()) for other in others) / scale
    row.peak_in_bands = peak_in_bands
    assert call.figures is not None
    row.whole = ", ".join(f"{name} ({count})" for name, count in sorted(call.figures.whole.items()))
    limit = max(2 * row.rounding, 16 * torch.finfo(dtype).eps)
    is_right = out.shape == stock.shape and out.dtype == stock.dtype and row.difference <= limit
    row.outcome = "exact" if is_right else "WRONG"
    return row


def _exact(network: Any, method: str, given: Any, dtype: Any) -> Any:
    """The result in a wider format; None where the class does not compute in it."""
    import copy

    import torch

    wide = torch.float64 if dtype == torch.float32 else torch.float32
    torch.manual_seed(2)
    try:
        rounded = copy.deepcopy(network).to(dtype).to(wide)
        return getattr(rounded, method)(given.to(dtype).to(wide))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def table(names: Sequence[str], dtype: Any, *, casts: bool, budget_mib: float, verbose: bool) -> list[Row]:
    """A row for each method of each family whose name contains one of ``names``."""
    import torch

    rows = []
    for found in FAMILIES:
        if names and not any(name.lower() in found.name.lower() for name in names):
            continue
        for method, shape in (("decode", found.latent), ("encode", found.picture)):
            if shape is None:
                continue
            try:
                with torch.inference_mode(), _quiet():
                    row = compare(found, method, dtype, casts=casts, budget_mib=budget_mib)
            except (ImportError, AttributeError) as error:
                row = Row(found.name, method, shape, f"not in this ComfyUI: {error}")
            except Exception as error:
                row = Row(found.name, method, shape, f"ComfyUI itself: {type(error).__name__}: {error}".splitlines()[0])
                if verbose:
                    traceback.print_exc()
            rows.append(row)
            print(" | ".join(row.cells()), flush=True)
    return rows


def markdown(title: str, rows: Sequence[Row]) -> str:
    """The table with a title, for a document."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row.cells())} |" for row in rows]
    return "\n".join([f"## {title}", "", *lines, ""])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python tools/vae_table_comfyui.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only families whose name contains one of these")
    parser.add_argument("--host", default=os.environ.get("COMFYUI_PATH"), help="a checkout of ComfyUI")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--casts", action="store_true", help="copies of the weights in every call, as when offloading")
    parser.add_argument("--budget-mib", type=float, default=0.5, help="small: in many bands (default 0.5)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--verbose", action="store_true", help="with tracebacks")
    options = parser.parse_args(argv)
    if not options.host or not (Path(options.host) / "comfyui_version.py").is_file():
        parser.error("--host must name a checkout of ComfyUI")
    sys.argv[1:] = ["--cpu"]
    sys.path[:1] = [options.host]
    sys.path.append(str(ROOT))
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    importlib.import_module("comfy.sd")
    rows = table(
        options.names,
        getattr(torch, options.dtype),
        casts=options.casts,
        budget_mib=options.budget_mib,
        verbose=options.verbose,
    )
    version = importlib.import_module("comfyui_version").__version__
    casts = ", weights copied in every call" if options.casts else ""
    counts = f"{sum(row.is_exact for row in rows)} of {len(rows)} exact"
    title = f"ComfyUI {version}, torch {torch.__version__}, {options.dtype}{casts}: {counts}"
    print(title)
    if options.markdown is not None:
        options.markdown.write_text(markdown(title, rows))
    return int(any(row.outcome == "WRONG" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
