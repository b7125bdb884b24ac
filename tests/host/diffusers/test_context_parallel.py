"""diffusers' context parallelism over two processes, each with a part of the tokens: Ulysses under our processor,
and a ring by diffusers' backend ``flash`` on our functions with lse. The answer is that of one process."""

import json
import os
from pathlib import Path

import diffusers
import pytest
from attn_support import fresh

PROGRAM = """
import json
import sys
import types

support = sys.modules["attn_support"] = types.ModuleType("attn_support")
support.__path__ = [sys.argv[1]]
from pascal_attn_core import patch_imports, record

patch_imports()  # before diffusers asks what is installed
import torch
from attn_support import tiny_pipelines
from attn_support.parallel.processes import run_in
from diffusers import ContextParallelConfig
from pascal_attn_core.diffusers import PascalAttnProcessor

model = tiny_pipelines.model("WanTransformer3DModel (text to video)", num_layers=2)
given = torch.randn(1, 4, 2, 16, 16), torch.tensor([3]), torch.randn(1, 12, 16)


@torch.no_grad()
def work(rank):
    right = model(*given, return_dict=False)[0]
    model.enable_parallelism(config=ContextParallelConfig(**{sys.argv[2]: 2}))
    if sys.argv[3] == "processor":
        model.set_attn_processor(PascalAttnProcessor())
    else:
        model.set_attention_backend(sys.argv[3])
    with record() as seen:
        out = model(*given, return_dict=False)[0]
    return (out - right).abs().max().item() / right.abs().max().item(), seen.total


print(json.dumps(run_in(2, work)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")
@pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none")
@pytest.mark.parametrize(("degree", "ours", "calls"), [("ulysses_degree", "processor", 4), ("ring_degree", "flash", 6)])
def test_the_answer_is_that_of_one_process(degree: str, ours: str, calls: int) -> None:
    """Two blocks with two attentions each; in a ring of two, self-attention takes two calls."""
    support = str(Path(__file__).parents[2] / "support")
    answers = json.loads(fresh.run(PROGRAM, support, degree, ours).splitlines()[-1])
    for distance, counted in answers:
        assert distance < 2e-6
        assert counted == calls
