"""Two processes share one Flux model by context parallelism: run as a script, rank 0 prints what it saw."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    results = [difference(how) for how in ("stock", "patch first", "patch", "processor first", "processor")]
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


def difference(how: str) -> tuple[str, float, int]:
    """(how, largest difference to the model on its own, calls that reached us)."""
    from diffusers import ContextParallelConfig

    from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline
    from tools.families import families
    from tools.families.proof import counted, outputs

    flux = next(family for family in families() if family.model == "FluxTransformer2DModel")

    def even_lengths(draw):
        inputs = flux.inputs(draw)
        text = {name: inputs[name][..., :8, :] for name in ("encoder_hidden_states", "txt_ids")}
        return {**inputs, **text, "return_dict": False}

    family = dataclasses.replace(flux, inputs=even_lengths)
    model = family.build()
    stock = outputs(family, model)
    steps = [lambda: model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))]
    if how != "stock":
        by_patch = how.startswith("patch")
        ours = (
            (lambda: patch_pipeline(model)) if by_patch else (lambda: model.set_attn_processor(PascalAttnProcessor()))
        )
        steps.insert(0 if how.endswith("first") else 1, ours)
    for step in steps:
        step()
    with counted() as calls:
        out = outputs(family, model)
    return how, (out - stock).abs().max().item(), len(calls)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
    import tools.families.proof  # noqa: F401  before the fork, for both

    with tempfile.TemporaryDirectory() as folder:
        how = "fork" if hasattr(os, "fork") else "spawn"
        mp.start_processes(work, (os.path.join(folder, "meeting"),), nprocs=2, start_method=how)
