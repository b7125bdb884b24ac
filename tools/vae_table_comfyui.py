"""``python tools/vae_table_comfyui.py``: the VAEs of ComfyUI in bands, as a table.

It runs in ComfyUI's interpreter, on a checkout that ``--host`` or ``COMFYUI_PATH`` names. The classes are ComfyUI's own
at a tiny size with random weights; each decodes and encodes as it is and in bands, and the two are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.vae import patch_vae

COLUMNS = ("family", "method", "input", "outcome", "difference", "rounding", "peak", "in bands", "of which whole")
Build = Callable[[], Any]


class Family(NamedTuple):
    """The models of a name: shapes of the inputs of decode and encode, and what makes their VAE."""

    name: str
    latent: tuple[int, ...]
    picture: tuple[int, ...]
    build: Build


def made(path: str, **arguments: Any) -> Build:
    """A function that makes an object of a class, whose path begins behind ``comfy``."""
    module, _, name = f"comfy.{path}".rpartition(".")
    return lambda: getattr(importlib.import_module(module), name)(**arguments)


def _config(**more: Any) -> dict[str, Any]:
    shape = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32}
    return {**shape, "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, **more}


def _kl(**config: Any) -> Build:
    return made("ldm.models.autoencoder.AutoencoderKL", ddconfig=_config(**config), embed_dim=4)


def _engine(
    encoder: str, decoder: str, config: dict[str, Any], regularizer: str = "DiagonalGaussian", **more: Any
) -> Build:
    return made(
        "ldm.models.autoencoder.AutoencodingEngine",
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}Regularizer"},
        encoder_config={"target": f"comfy.ldm.{encoder}", "params": config},
        decoder_config={"target": f"comfy.ldm.{decoder}", "params": {**config, **more}},
    )


def _hunyuan(module: str, regularizer: str = "DiagonalGaussian", **more: Any) -> Build:
    config = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "block_out_channels": [32, 64, 64]}
    config |= {"ffactor_spatial": 4, "z_channels": 16, **more}
    return _engine(f"hunyuan_video.{module}.Encoder", f"hunyuan_video.{module}.Decoder", config, regularizer)


def _refiner(is_refiner: bool) -> Build:
    regularizer = "Empty" if is_refiner else "DiagonalGaussian"
    return _hunyuan("vae_refiner", regularizer, ffactor_temporal=4, refiner_vae=is_refiner)


def _ltx(version: int) -> Build:
    def one_layer(how: Any) -> Any:
        if type(how) is int:
            return min(how, 1)
        return {**how, "num_layers": 1} if "num_layers" in how else how

    def build() -> Any:
        vae = importlib.import_module("comfy.ldm.lightricks.vae.causal_video_autoencoder").VideoVAE
        default = vae.get_default_config if hasattr(vae, "get_default_config") else vae.guess_config  # before 0.9
        config = {**default(vae, version)}
        config |= {"encoder_base_channels": 16, "decoder_base_channels": 16}
        for side in {"blocks", "encoder_blocks", "decoder_blocks"} & config.keys():
            config[side] = [[name, one_layer(how)] for name, how in config[side]]
        return vae(version=version, config=config)

    return build


_LATENT, _PICTURE = (1, 4, 13, 11), (1, 3, 52, 44)
_VIDEO_LATENT, _VIDEO = (1, 16, 3, 8, 6), (1, 3, 9, 64, 48)
_LTX_LATENT, _LTX_VIDEO = (1, 128, 3, 3, 2), (1, 3, 17, 96, 64)
_WAN = {"dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
_COSMOS = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 64, "in_channels": 3, "out_channels": 3,
    "channels": 16, "channels_mult": [2, 4, 4], "num_res_blocks": 1, "dropout": 0.0, "attn_resolutions": [32],
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip
_DCAE = {f"{side}_block_out_channels": (32, 64, 64, 64) for side in ("encoder", "decoder")}
_DCAE |= {f"{side}_layers_per_block": (1, 1, 1, 1) for side in ("encoder", "decoder")}
_ACE = {"source_sample_rate": 44100, "dcae_config": _DCAE}
_COG = {"block_out_channels": (32, 32, 32, 64), "layers_per_block": 1, "groups": 8}
_SA3 = {"channels": 64, "transformer_depths": 1, "sinusoidal_blocks": 0}
_H3 = {"encoder_dim": 8, "latent_dim": 256, "decoder_dim": 128}
_OOBLECK = {"channels": 8, "latent_dim": 16}
_MODEL = "modules.diffusionmodules.model"
_FLUX = _engine(f"{_MODEL}.Encoder", f"{_MODEL}.Decoder", _config(z_channels=16))
_VIDEO_DECODER: dict[str, Any] = {"video_kernel_size": [3, 1, 1], "alpha": 0.0}
_SVD = _engine(f"{_MODEL}.Encoder", "modules.temporal_ae.VideoDecoder", _config(), **_VIDEO_DECODER)
_STAGE_A = {"bottleneck_blocks": 2, "c_hidden": 64, "codebook_size": 64}

# Mochi, MMAudio, Mage-Flow, SeedVR2 and the vocoder of ACE-Step have their published widths.
FAMILIES = [
    Family("SD 1.5, SDXL", _LATENT, _PICTURE, _kl()),
    Family("SD3, Flux", (1, 16, 13, 11), _PICTURE, _FLUX),
    Family("Flux 2", (1, 16, 7, 5), (1, 3, 56, 40), _kl(batch_norm_latent=True)),
    Family("Stable Video Diffusion", (3, 4, 9, 7), (3, 3, 36, 28), _SVD),
    Family("TAESD", _LATENT, (1, 3, 104, 88), made("taesd.taesd.TAESD", latent_channels=4)),
    Family("TAEHV (Wan 2.1)", _VIDEO_LATENT, _VIDEO, made("taesd.taehv.TAEHV", latent_channels=16)),
    Family("TAEHV (Wan 2.2)", (1, 48, 3, 6, 4), (1, 3, 9, 96, 64), made("taesd.taehv.TAEHV", latent_channels=48)),
    Family("Stable Cascade, stage A", _LATENT, _PICTURE, made("ldm.cascade.stage_a.StageA", **_STAGE_A)),
    Family("Stable Cascade, stage C", (1, 16, 5, 3), (1, 3, 128, 96), made("ldm.cascade.stage_c_coder.StageC_coder")),
    Family("Wan 2.1, Qwen-Image", _VIDEO_LATENT, _VIDEO, made("ldm.wan.vae.WanVAE", z_dim=16, **_WAN)),
    Family("Wan 2.2", (1, 48, 3, 4, 6), (1, 3, 9, 64, 96), made("ldm.wan.vae2_2.WanVAE", dec_dim=16, z_dim=48, **_WAN)),
    *(Family(f"LTX-Video 0.9{of}", _LTX_LATENT, _LTX_VIDEO, _ltx(n)) for n, of in enumerate(("", ".1", ".5"))),
    Family("HunyuanVideo", (1, 4, 3, 8, 6), (1, 3, 9, 32, 24), _kl(conv3d=True, time_compress=4)),
    Family("HunyuanImage 2.1", (1, 16, 9, 7), (1, 3, 36, 28), _hunyuan("vae")),
    Family("HunyuanVideo 1.5", (1, 16, 3, 6, 5), (1, 3, 9, 24, 20), _refiner(True)),
    Family("HunyuanImage refiner", (1, 16, 1, 6, 5), (1, 3, 1, 24, 20), _refiner(False)),
    Family("CogVideoX", (1, 16, 3, 6, 5), (1, 3, 9, 48, 40), made("ldm.cogvideo.vae.AutoencoderKLCogVideoX", **_COG)),
    Family("Mochi", (1, 12, 3, 5, 4), (1, 3, 13, 40, 32), made("ldm.genmo.vae.model.VideoVAE")),
    Family("Cosmos", (1, 16, 3, 6, 5), _VIDEO, made("ldm.cosmos.vae.CausalContinuousVideoTokenizer", **_COSMOS)),
    Family("Stable Audio", (1, 16, 24), (1, 2, 4096), made("ldm.audio.autoencoder.AudioOobleckVAE", **_OOBLECK)),
    Family("Stable Audio 3", (1, 256, 24), (1, 2, 65536), made("ldm.audio.vae_sa3.SA3AudioVAE", **_SA3)),
    Family("ACE-Step", (1, 8, 16, 24), (1, 2, 32768), made("ldm.ace.vae.music_dcae_pipeline.MusicDCAE", **_ACE)),
    Family("MMAudio", (1, 20, 12), (1, 2, 44100), made("ldm.mmaudio.vae.autoencoder.AudioAutoencoder", mode="16k")),
    Family("Mage-Flow", (1, 128, 6, 4), (1, 3, 96, 64), made("ldm.mage_flow.vae.MageVAE")),
    Family("SeedVR2", (1, 16, 2, 5, 4), (1, 3, 5, 40, 32), made("ldm.seedvr.vae.VideoAutoencoderKLWrapper")),
    Family("MiniMax H3 sound", (1, 32, 2, 12), (1, 2, 16000), made("ldm.minimax.audio_vae.MiniMaxH3AudioVAE", **_H3)),
    Family("pixel space", (1, 3, 24, 16), (1, 3, 24, 16), made("pixel_space_convert.PixelspaceConversionVAE")),
]


# ---- running them ----------------------------------------------------------------------------------------------------


def with_random_weights(network: Any) -> Any:
    """The network with weights under which no layer fades or explodes."""
    generator = torch.Generator().manual_seed(0)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    with torch.no_grad():
        for name, tensor in network.named_parameters():
            last, inputs = name.rpartition(".")[2], math.prod(tensor.shape[1:])
            if tensor.dim() >= 2 and inputs > 1:
                tensor.copy_(normal(tensor) / math.sqrt(inputs))
            else:
                is_gain = last in ("weight", "gamma", "alpha", "beta", "original0", "weight_g")
                tensor.copy_(is_gain + 0.1 * normal(tensor))
        for name, tensor in network.named_buffers():
            last = name.rpartition(".")[2]
            if tensor.is_floating_point() and last in ("mean-of-means", "latents_mean", "running_mean"):
                tensor.copy_(0.1 * normal(tensor))
            elif tensor.is_floating_point() and last in ("std-of-means", "latents_std", "running_var"):
                tensor.copy_(1 + 0.1 * normal(tensor).abs())
    return network.eval().requires_grad_(False)


def cast_on_every_call(network: Any) -> None:
    """As ComfyUI does with weights that are not on the device: each call is given copies of them."""
    for module in network.modules():
        if hasattr(module, "comfy_cast_weights"):
            module.comfy_cast_weights = True
            module.weight_function = [lambda weight: weight.clone()]
            module.bias_function = [lambda bias: bias.clone()]


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference."""
    return float((one.double() - other.double()).abs().max())


def compare(
    network: Any, method: str, shape: tuple[int, ...], dtype: torch.dtype, *, casts: bool, budget_mib: float
) -> list[str]:
    """The method of the network as it is and in bands: the cells of its row from the outcome on, as many as are known.
    Peaks are in MiB."""
    generator = torch.Generator().manual_seed(1)
    if method == "decode":
        given = torch.randn(shape, generator=generator)
    else:
        given = 2 * torch.rand(shape, generator=generator) - 1

    def call(network: Any, given: Tensor) -> Tensor:
        torch.manual_seed(2)
        return getattr(network, method)(given.clone())

    network, given = with_random_weights(network).to(dtype), given.to(dtype)
    wide, others = torch.float64 if dtype == torch.float32 else torch.float32, []
    with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):  # it does not compute in it
        others.append(call(copy.deepcopy(network).to(wide), given.to(wide)))
    if casts:
        cast_on_every_call(network)
    stock = measure(lambda: call(network, given))
    peak = f"{stock.peak_bytes / 2**20:.1f}"
    if not bool(stock.out.isfinite().all()):
        return ["ComfyUI itself: gives NaN or infinity with these weights", "", "", peak]
    signs = torch.sign(torch.randn(shape, generator=generator)).to(dtype)
    others.append(call(network, given * (1 + torch.finfo(dtype).eps / 2 * signs)))
    with patch_vae(network, budget_mib=budget_mib) as patch:
        call(network, given)  # the proof, so that it is not measured
        bands = measure(lambda: call(network, given))
        state = patch.report().calls[-1]
    if state.figures is None or state.state != "on":
        return [f"refused: {state.why}", "", "", peak]
    scale = max(float(stock.out.float().abs().max()), 1e-30)
    difference = largest(bands.out, stock.out) / scale
    rounding = max(largest(stock.out, other) for other in others) / scale
    whole = ", ".join(f"{name} ({count})" for name, count in sorted(state.figures.whole.items()))
    limit = max(2 * rounding, 16 * torch.finfo(dtype).eps)
    is_alike = bands.out.shape == stock.out.shape and bands.out.dtype == stock.out.dtype
    outcome = "exact" if is_alike and difference <= limit else "WRONG"
    return [outcome, f"{difference:.1e}", f"{rounding:.1e}", peak, f"{bands.peak_bytes / 2**20:.1f}", whole]


def outcomes(names: list[str], **conditions: Any) -> list[str]:
    """Print a row for each method of each family whose name contains one of ``names``; return their outcomes."""
    found = []
    for family in FAMILIES:
        if names and not any(name.lower() in family.name.lower() for name in names):
            continue
        for method, shape in (("decode", family.latent), ("encode", family.picture)):
            try:
                with torch.inference_mode(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    cells = compare(family.build(), method, shape, **conditions)
            except (ImportError, AttributeError) as error:
                cells = [f"not in this ComfyUI: {error}"]
            except Exception as error:
                traceback.print_exc()
                cells = [f"ComfyUI itself: {type(error).__name__}: {error}".splitlines()[0]]
            found.append(cells[0])
            cells = [family.name, method, "x".join(map(str, shape)), cells[0].replace("|", "/"), *cells[1:]]
            print(f"| {' | '.join([*cells, *[''] * (len(COLUMNS) - len(cells))])} |", flush=True)
    return found


def main() -> int:
    """Run the command; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python tools/vae_table_comfyui.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only families whose name contains one of these")
    parser.add_argument("--host", default=os.environ.get("COMFYUI_PATH"), help="a checkout of ComfyUI")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--casts", action="store_true", help="copies of the weights in every call, as when offloading")
    parser.add_argument("--budget-mib", type=float, default=0.5, help="small: in many bands (default 0.5)")
    given = vars(parser.parse_args())
    host, name = given.pop("host"), given.pop("dtype")
    if not host or not (Path(host) / "comfyui_version.py").is_file():
        parser.error("--host must name a checkout of ComfyUI")
    sys.argv[1:] = ["--cpu"]
    sys.path[:1] = [host]
    importlib.import_module("comfy.options").enable_args_parsing()
    importlib.import_module("comfy.sd")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    found = outcomes(given.pop("names"), dtype=getattr(torch, name), **given)
    version = importlib.import_module("comfyui_version").__version__
    casts = ", weights copied in every call" * given["casts"]
    counts = f"{found.count('exact')} of {len(found)} exact"
    print(f"\nComfyUI {version}, torch {torch.__version__}, {name}{casts}: {counts}")
    return int("WRONG" in found)


if __name__ == "__main__":
    raise SystemExit(main())
