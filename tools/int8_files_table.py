"""How far whole models are from the float arithmetic of the same file when their linear layers run in 8 bits.

Small models of diffusers with random weights, in GGUF files made with the package gguf, and in 8-bit floats.

    python -m tools.int8_files_table                       # print the table
    python -m tools.int8_files_table --write docs/gguf.md  # put it between the marks in the document
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pascal_attn_core.int8 import Int8Report, patch_linear_int8
from tools.int8_table import command, far, models

BEGIN, END = "<!-- errors by file: tools.int8_files_table -->", "<!-- end of errors by file -->"
GGUF, FLOATS_8 = ("Q8_0", "Q4_0", "Q4_K"), ("float8_e4m3fn", "float8_e5m2")
OUTLIERS, FACTOR = 8, 50.0  # channels of each layer's input, and how much larger they are


MODELS = models("files")


def q4_k(weights: Tensor) -> Tensor:
    """Weights ``[n, 256]`` in blocks of Q4_K, uint8 ``[n, 144]``, each sub-block of 32 between its minimum and maximum.
    The package gguf has only the inverse."""
    groups = weights.view(-1, 8, 32)
    least = -groups.amin(2).clamp(max=0)
    widths = (groups.amax(2) + least) / 15
    halves = [(part.amax(1, keepdim=True) / 63).half() for part in (widths, least)]
    scales, minima = (
        (part / half.float().clamp(min=1e-8)).round().clamp(0, 63).byte() for part, half in zip((widths, least), halves)
    )
    wide = (halves[0].float() * scales)[..., None]
    codes = ((groups + (halves[1].float() * minima)[..., None]) / wide.clamp(min=1e-8)).round().clamp(0, 15).byte()
    high = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    low = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    pairs = codes.view(-1, 4, 2, 32)
    halves = [half.view(torch.uint8) for half in halves]
    return torch.cat([*halves, *high, low, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)], dim=1)


def write_gguf(path: Path, model: nn.Module, name: str) -> None:
    """The model's file: matrices in a format, those of a width that it does not divide in Q8_0, the rest in float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "tiny")
    for key, value in model.state_dict().items():
        kind = name if value.dim() == 2 and value.shape[1] % 256 == 0 else "Q8_0"
        if not key.endswith(".weight") or value.dim() != 2 or value.shape[1] % 32:
            writer.add_tensor(key, value.numpy())
        elif kind == "Q4_K":
            blocks = q4_k(value.reshape(-1, 256)).view(value.shape[0], -1)
            writer.add_tensor(key, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(key, gguf.quants.quantize(value.numpy(), raw), raw_dtype=raw)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def loaded(model: Any, name: str, dtype: torch.dtype, folder: Path) -> nn.Module:
    """The model from a file in a format, computing in a dtype."""
    import diffusers

    if name in FLOATS_8:
        model.save_pretrained(folder)
        copied = type(model).from_pretrained(folder, torch_dtype=dtype)
        copied.enable_layerwise_casting(storage_dtype=getattr(torch, name), compute_dtype=dtype)
        return copied.eval().requires_grad_(False)
    model.save_config(folder)
    write_gguf(folder / "model.gguf", model, name)
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    options = {"config": str(folder), "quantization_config": config, "torch_dtype": dtype}
    return type(model).from_single_file(str(folder / "model.gguf"), **options).eval().requires_grad_(False)


def plant(model: nn.Module) -> None:
    """Let some channels of each linear layer's input be large."""

    def enlarge(module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = args[0].clone()
        x[..., :OUTLIERS] *= FACTOR
        return (x, *args[1:])

    for module in model.modules():
        if "Linear" in type(module).__name__:
            module.register_forward_pre_hook(enlarge)


def errors_of(title: str, name: str) -> tuple[dict[str, float], Int8Report, Int8Report]:
    """Relative errors of a model's output, by what computed it, and the reports without and with planted outliers."""
    torch.manual_seed(0)
    model, call = MODELS[title]()
    model.eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        stored = loaded(model, name, torch.float32, Path(folder))
        exact, found = call(stored, torch.float32), {}
        found["the file itself"] = far(exact, call(model, torch.float32))
        found["bfloat16"] = far(call(loaded(model, name, torch.bfloat16, Path(folder)), torch.bfloat16), exact)
        with patch_linear_int8(stored, max_error=1.0) as patch:
            found["8 bits"] = far(call(stored, torch.float32), exact)
            report = patch.report()
        plant(stored)
        with patch_linear_int8(stored, max_error=1.0) as patch:
            call(stored, torch.float32)
            return found, report, patch.report()


def table() -> str:
    """The table in Markdown."""
    columns = ("the file itself", "bfloat16", "8 bits")
    lines = ["| model | file | layers in 8 bits | " + " | ".join(columns) + " | 8 bits, per layer | with outliers |"]
    lines.append("|---|---|---|" + "---|" * (len(columns) + 2))
    for title in MODELS:
        for name in (*GGUF, *FLOATS_8):
            errors, *reports = errors_of(title, name)
            on = [line for line in reports[0].of("on") if line.format == name]
            layers = [f"{report.median_error:.2%}, {report.worst.error:.2%}" for report in reports if report.worst]
            cells = [*(f"{errors[column]:.2%}" for column in columns), *layers]
            lines.append(f"| {title} | {name} | {len(on)} of {len(reports[0].lines)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ["PASCAL_ATTN_NO_TIMING"] = "1"  # else a layer that was faster in float would be measured in float
    command(__doc__, (BEGIN, END), table)
