"""How far whole models are from float64 in float16, in bfloat16, with int8 linear layers and with int8 attention: small
models of diffusers with random weights.

    python tools/int8_table.py                       # print the table
    python tools/int8_table.py --write docs/int8.md  # put it between the marks in the document
"""

from __future__ import annotations

import argparse
import copy
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pascal_attn_core.int8 import Int8Report, patch_attention_int8, patch_linear_int8

BEGIN, END = "<!-- errors: tools/int8_table.py -->", "<!-- end of errors -->"
Call = Callable[[nn.Module, torch.dtype], Tensor]
SEEDS = 3


def sdxl() -> tuple[nn.Module, Call]:
    """A UNet with SDXL's kinds of blocks, 64 and 128 channels."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        cross_attention_dim=96,
        norm_num_groups=16,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64 + 6 * 8,
    )

    def call(model: nn.Module, dtype: torch.dtype) -> Tensor:
        latent, text, pooled, ids = (
            normal(*size, dtype=dtype) for size in ((2, 4, 16, 16), (2, 77, 96), (2, 64), (2, 6))
        )
        more = {"text_embeds": pooled, "time_ids": ids}
        return model(latent, torch.tensor([400, 400]), text, added_cond_kwargs=more).sample

    return model, call


def flux(head_dim: int = 32) -> tuple[nn.Module, Call]:
    """Two blocks of two streams, two of one, with four heads: 128 features."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=head_dim,
        num_attention_heads=4,
        joint_attention_dim=96,
        pooled_projection_dim=64,
        axes_dims_rope=(head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8),
    )

    def call(model: nn.Module, dtype: torch.dtype) -> Tensor:
        ids = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(12.0), torch.arange(12.0), indexing="ij"), -1)
        return model(
            hidden_states=normal(1, 144, 16, dtype=dtype),
            encoder_hidden_states=normal(1, 24, 96, dtype=dtype),
            pooled_projections=normal(1, 64, dtype=dtype),
            timestep=torch.tensor([0.4], dtype=dtype),
            img_ids=ids.view(-1, 3).to(dtype),
            txt_ids=torch.zeros(24, 3, dtype=dtype),
        ).sample

    return model, call


def wan(head_dim: int = 32) -> tuple[nn.Module, Call]:
    """Three blocks with four heads: 128 features."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=head_dim,
        in_channels=16,
        out_channels=16,
        text_dim=96,
        freq_dim=64,
        ffn_dim=512,
        num_layers=3,
        rope_max_seq_len=64,
    )

    def call(model: nn.Module, dtype: torch.dtype) -> Tensor:
        latent, text = normal(1, 16, 3, 16, 16, dtype=dtype), normal(1, 24, 96, dtype=dtype)
        return model(latent, torch.tensor([400]), text).sample

    return model, call


MODELS = {"SDXL UNet": sdxl, "Flux": flux, "Wan": wan}


def normal(*size: int, dtype: torch.dtype) -> Tensor:
    """Normal random numbers, the same for every dtype."""
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64).to(dtype)


def far(out: Tensor, exact: Tensor) -> float:
    """The relative error of an output (root of the sum of squares)."""
    return ((out.double() - exact.double()).norm() / exact.double().norm()).item()


def errors_of(name: str, seed: int) -> tuple[dict[str, float], Int8Report]:
    """Relative errors of a model's output, by what computed it."""
    torch.manual_seed(seed)
    model, call = MODELS[name]()
    model.eval().requires_grad_(False)
    exact = call(copy.deepcopy(model).double(), torch.float64)
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        cast = copy.deepcopy(model).to(dtype)
        found[short] = far(call(cast, dtype), exact)
        with patch_linear_int8(cast) as patch:
            found[f"int8, rest in {short}"] = far(call(cast, dtype), exact)
            if dtype == torch.float32:
                report = patch.report()
        if dtype == torch.float32:
            with patch_attention_int8(cast, max_error=1.0):
                found["int8 attention"] = far(call(cast, dtype), exact)
    return found, report


def table() -> str:
    """In Markdown: the medians over SEEDS models with random weights."""
    floats = ("float32", "float16", "bfloat16")
    columns = (*floats, *(f"int8, rest in {name}" for name in floats), "int8 attention")
    lines = ["| model | layers in int8 | error per layer, median and most | " + " | ".join(columns) + " |"]
    lines.append("|---|---|---|" + "---|" * len(columns))
    for name in MODELS:
        runs = [errors_of(name, seed) for seed in range(SEEDS)]
        report = runs[0][1]
        layers = f"{report.count('int8')} of {len(report.lines)}"
        worst = report.worst
        assert worst is not None
        cells = [f"{sorted(errors[column] for errors, _ in runs)[SEEDS // 2]:.1e}" for column in columns]
        lines.append(
            f"| {name} | {layers} | {report.median_error:.2%}, {worst.error:.2%} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def command(about: str | None, marks: tuple[str, str], table: Callable[..., str], **options: dict[str, Any]) -> None:
    """Print a table, and put it between two marks of the document that ``--write`` names.

    Args:
        options: of the command line, name -> arguments of ``add_argument``; ``table`` is called with their values.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in (options | {"write": {"type": Path, "help": "the document"}}).items():
        parser.add_argument(f"--{name}", **option)
    given = vars(parser.parse_args())
    path = given.pop("write")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # on casts, which are what this is about
    with torch.no_grad():
        text = table(**given)
    print(text)
    if path:
        document, (begin, end) = path.read_text(encoding="utf-8"), marks
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        assert pattern.search(document), f"{path} has no marks {begin}"
        path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document), encoding="utf-8")


if __name__ == "__main__":
    command(__doc__, (BEGIN, END), table)
