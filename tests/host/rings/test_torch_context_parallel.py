"""The switch for a whole process beside torch's own ``context_parallel``: its calls stay whole."""

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attn_support import fresh
from attn_support.parallel.processes import run_in

from pascal_attn_core import record
from pascal_attn_core.sdpa_patch import patch_sdpa

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")


def _beside_torchs_own() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    def attend(mesh: Any, *, before: bool) -> str:
        tensors = tuple(torch.randn(1, 4, 64, 32) for _ in range(3))
        ours = patch_sdpa() if before else contextlib.nullcontext()
        with record() as report, ours, context_parallel(mesh, buffers=list(tensors), buffer_seq_dims=[2, 2, 2]):
            try:
                said = f"{F.scaled_dot_product_attention(*tensors, is_causal=True).shape}"
            except NotImplementedError as error:  # on a CPU torch shares out no attention at all
                said = str(error)
        assert not report.calls, report.text()
        return said

    def work(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        stock = F.scaled_dot_product_attention
        said = [attend(mesh, before=False), attend(mesh, before=True)]
        with context_parallel(mesh, buffers=[torch.zeros(1, 4, 64, 32)], buffer_seq_dims=[2]):
            theirs = F.scaled_dot_product_attention
            try:
                patch_sdpa()
            except RuntimeError as error:
                said.append(str(error))
            assert F.scaled_dot_product_attention is theirs is not stock
        assert F.scaled_dot_product_attention is stock
        return said

    for answer in run_in(2, work):
        assert isinstance(answer, list), answer
        assert answer[0] == answer[1], answer
        assert answer[2].startswith("the switch must be set before torch's context_parallel is entered")


def test_set_before_its_calls_are_torchs_and_set_within_it_is_refused() -> None:
    pytest.importorskip("torch.distributed.tensor.experimental")
    fresh.call(_beside_torchs_own)
