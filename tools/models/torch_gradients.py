"""Counts the instructions that torch's kernel for gradients in float32 on Pascal issues, executed on a CPU:
``python -m tools.models.torch_gradients FOLDER``.

The folder holds the machine code of libtorch_cuda.so of torch 2.6.0: ``cuobjdump -arch sm_60 -xelf all`` puts it there,
which comes with Triton 3.0; ``make nvdisasm`` brings what reads it. Counted are tiles of 64 keys behind the first two.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attn_support.nvidia.code import MachineKernel, kernels
from attn_support.nvidia.machine import run

_QUERIES, _TILE, _THREADS, _SHARED = 128, 64, 128, 37120


def issued(kernel: MachineKernel, head_dim: int, keys: int) -> int:
    """Instructions of a thread, for one head."""
    query, out, grad_out, dq, lse, delta = torch.zeros(6, _QUERIES, head_dim)
    key, value, dk, dv = torch.zeros(4, keys, head_dim)
    given = (query, key, value, None, lse, out, grad_out, delta, None, None, dq, dk, dv, None, None, None, None)
    addresses = [0 if t is None else t.data_ptr() for t in given]
    numbers = [0, 1.0, head_dim, head_dim, _QUERIES, keys, 1, 0, *[head_dim] * 3, 0, head_dim, 0, 1]
    params = struct.pack("<17Qif5iB3x6ib", *addresses, *numbers).ljust(kernel.params_bytes, b"\0")
    of_block = {"grid": (1, 1, 1), "threads": _THREADS, "shared_bytes": _SHARED}
    launch: Any = SimpleNamespace(params=params, keep=[t for t in given if t is not None], **of_block)
    return run(launch, kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    found = 0
    for code in (path.read_bytes() for path in parser.parse_args().folder.glob("*.cubin")):
        for head_dim in (64, 128):
            name = f"fmha_cutlassB_f32_aligned_64x64_k{head_dim}_sm50"
            if name.encode() in code:
                (kernel,) = (kernel for function, kernel in kernels(code).items() if name in function)
                more = issued(kernel, head_dim, 3 * _TILE) - issued(kernel, head_dim, 2 * _TILE)
                each = more * _THREADS / _QUERIES / _TILE
                print(f"head_dim {head_dim}: {each:.0f} instructions per score, {5 * head_dim / each:.1%} multiply")
                found += 1
    if not found:
        parser.error("FOLDER must hold *.cubin with fmha_cutlassB_f32_aligned_64x64_k64_sm50 or k128, got none")


if __name__ == "__main__":
    main()
