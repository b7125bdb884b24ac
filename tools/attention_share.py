"""Share of attention in one denoising step: the multiplications of real models, counted on tensors without data.

    python tools/attention_share.py
    python tools/attention_share.py --attention 3.5 --linear 3

Prints a table: the share of attention, of linear layers and of convolutions, and by how much a step gets faster if
attention and linear layers are so many times as fast (Amdahl's law, all kinds at the same rate; for attention alone
1 / (1 - share + share / 1.5)). The models are the published configurations of diffusers; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pascal_attn_core.patching.interception import SdpaMode, bind_sdpa


class Step(NamedTuple):
    """Floating-point operations of one step, a multiply-add counted as two."""

    attention: int
    linear: int
    convolution: int

    @property
    def share(self) -> float:
        return self.attention / sum(self)

    def gain(self, attention: float = 1.5, linear: float = 1.0) -> float:
        """How many times as fast the step gets if attention and linear layers get so many times as fast."""
        return sum(self) / (self.attention / attention + self.linear / linear + self.convolution)


class _Attention:
    """Counts the two products of each call of torch's attention and computes neither of them."""

    def __init__(self) -> None:
        self.flops = 0

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        call = bind_sdpa(args, kwargs)
        assert not isinstance(call, str), call
        rows, keys = call.query.shape[:-1], call.key.shape[-2]
        self.flops += 2 * rows.numel() * keys * (call.query.shape[-1] + call.value.shape[-1])
        return call.query.new_empty(*rows, call.value.shape[-1])


def count(build: Callable[[], nn.Module], run: Callable[[nn.Module], object]) -> Step:
    """The operations of ``run`` with a model that ``build`` makes on the meta device."""
    with torch.device("meta"):
        model = build().eval()
        attention, rest = _Attention(), FlopCounterMode(display=False)
        with torch.no_grad(), rest, SdpaMode(attention):
            run(model)
    by_operator = rest.get_flop_counts()["Global"]
    convolution = sum(flops for operator, flops in by_operator.items() if "conv" in str(operator))
    return Step(attention.flops, rest.get_total_flops() - convolution, convolution)


# ---- the models ------------------------------------------------------------------------------------------------------

SD15: dict[str, Any] = {
    "sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
}  # fmt: skip
SDXL: dict[str, Any] = {
    "sample_size": 128, "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280], "transformer_layers_per_block": [1, 2, 10],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_empty = torch.empty
WAN_SMALL = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}


def _unet(side: int, width: int, **added: Any) -> Callable[[nn.Module], object]:
    """Two pictures: with the prompt and without it."""
    return lambda model: model(_empty(2, 4, side, side), _empty(2), _empty(2, 77, width), **added)


def _flux(tokens: int) -> Callable[[nn.Module], object]:
    return lambda model: model(
        hidden_states=_empty(1, tokens, 64), encoder_hidden_states=_empty(1, 512, 4096),
        pooled_projections=_empty(1, 768), timestep=_empty(1), img_ids=_empty(tokens, 3), txt_ids=_empty(512, 3),
        guidance=_empty(1),
    )  # fmt: skip


def _wan(frames: int, height: int, width: int) -> Callable[[nn.Module], object]:
    latents = (1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)
    return lambda model: model(
        hidden_states=_empty(*latents), timestep=_empty(1), encoder_hidden_states=_empty(1, 512, 4096)
    )


def _hunyuan(model: nn.Module) -> object:
    return model(
        hidden_states=_empty(1, 16, 16, 60, 106), timestep=_empty(1), encoder_hidden_states=_empty(1, 256, 4096),
        encoder_attention_mask=torch.ones(1, 256, dtype=torch.long), pooled_projections=_empty(1, 768),
        guidance=_empty(1),
    )  # fmt: skip


def steps() -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object]]]:
    """By name: how the model is built, and how one step of it is called."""
    import diffusers as d

    with torch.device("meta"):
        conditions = {"added_cond_kwargs": {"text_embeds": _empty(2, 1280), "time_ids": _empty(2, 6)}}
    sd15 = lambda: d.UNet2DConditionModel(**SD15)  # noqa: E731
    sdxl = lambda: d.UNet2DConditionModel(**SDXL)  # noqa: E731
    flux = lambda: d.FluxTransformer2DModel(guidance_embeds=True)  # noqa: E731
    return {
        "SD1.5 512": (sd15, _unet(64, 768)),
        "SDXL 1024": (sdxl, _unet(128, 2048, **conditions)),
        "SDXL 2048": (sdxl, _unet(256, 2048, **conditions)),
        "Flux 1024": (flux, _flux(4096)),
        "Flux 2048": (flux, _flux(16384)),
        "Wan 14B, 832x480, 81 frames": (d.WanTransformer3DModel, _wan(81, 480, 832)),
        "HunyuanVideo, 848x480, 61 frames": (lambda: d.HunyuanVideoTransformer3DModel(guidance_embeds=True), _hunyuan),
        "Wan 1.3B, 832x480, 81 frames": (lambda: d.WanTransformer3DModel(**WAN_SMALL), _wan(81, 480, 832)),
        "Wan 14B, 1280x720, 81 frames": (d.WanTransformer3DModel, _wan(81, 720, 1280)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=float, default=1.5, help="how many times as fast")
    parser.add_argument("--linear", type=float, default=1.0, help="how many times as fast")
    faster = vars(parser.parse_args())
    words = ", ".join(f"{name} {times:g} times as fast" for name, times in faster.items() if times != 1)
    print(f"| one step | attention | linear | convolution | {words} gives |")
    print("|---|---|---|---|---|")
    for name, (build, run) in steps().items():
        step = count(build, run)
        shares = " | ".join(f"{part / sum(step):.1%}" for part in step)
        print(f"| {name} | {shares} | {step.gain(**faster):.2f} times |", flush=True)


if __name__ == "__main__":
    main()
