"""yunchang (under xDiT and raylight) and ring-flash-attn run their rings on our ``flash_attn``, over two processes.

The switch for a whole process beside torch's own ``context_parallel``: its calls stay whole.
"""

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attn_support import fresh
from attn_support.parallel.processes import run_in
from torch import Tensor

from pascal_attn_core import record, sdpa
from pascal_attn_core.flash_attn import install_as_flash_attn
from pascal_attn_core.sdpa_patch import patch_sdpa

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")
Ring = Callable[[Tensor, Tensor, Tensor], Any]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def distances(ring: Ring, *, causal: bool, parts: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the relative distances of out and the gradients of q, k and v from those of one process in float32."""
    draws = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 64, 4, 32, generator=draws).half() for _ in range(4)]
    leaves = [t.float().requires_grad_() for t in tensors[:3]]
    out = sdpa(*(leaf.transpose(1, 2) for leaf in leaves), is_causal=causal).transpose(1, 2)
    right = [out, *torch.autograd.grad(out, leaves, tensors[3].float())]
    own = [parts(t).clone().requires_grad_() for t in tensors[:3]]
    result = ring(*own)
    result = result[0] if isinstance(result, tuple) else result
    found = [result, *torch.autograd.grad(result, own, parts(tensors[3]))]
    return [((one.float() - parts(other)).abs().max() / other.abs().max()).item() for one, other in zip(found, right)]


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def zigzag(tensor: Tensor) -> Tensor:
    """A part from the front and its mirror from the end: the same work for all under a causal rule."""
    parts = tensor.chunk(2 * dist.get_world_size(), 1)
    return torch.cat([parts[dist.get_rank()], parts[-1 - dist.get_rank()]], 1)


def judge(work: Callable[[int], Any]) -> None:
    for answer in run_in(2, work):
        assert isinstance(answer, dict), answer
        assert max(max(found) for found in answer.values()) < 4e-3, answer


@needs("yunchang")
@fresh.alone
def test_yunchang() -> None:
    install_as_flash_attn(replace=True)
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType
    from yunchang.ring import ring_flash_attn_func, zigzag_ring_flash_attn_func

    def work(rank: int) -> dict[str, list[float]]:
        world = dist.group.WORLD

        def ring(kind: Any, causal: bool) -> Ring:
            return lambda *x: ring_flash_attn_func(*x, causal=causal, group=world, attn_type=kind)

        found = {
            f"{kind}, causal {causal}": distances(ring(kind, causal), causal=causal, parts=contiguous)
            for kind, causal in ((AttnType.FA, False), (AttnType.FA, True), (AttnType.FA3, False))  # FA3 ignores causal
        }
        by_halves = lambda *x: zigzag_ring_flash_attn_func(*x, causal=True, group=world, attn_type=AttnType.FA)  # noqa: E731
        found["zigzag"] = distances(by_halves, causal=True, parts=zigzag)
        set_seq_parallel_pg(1, 2, rank, 2)
        both = LongContextAttention(attn_type=AttnType.FA)
        found["LongContextAttention"] = distances(lambda *x: both(*x, causal=False), causal=False, parts=contiguous)
        return found

    judge(work)


@needs("ring_flash_attn")
@fresh.alone
def test_ring_flash_attn() -> None:
    install_as_flash_attn(replace=True)
    # its __init__ imports an adapter that needs an older Transformers
    spec = importlib.util.find_spec("ring_flash_attn")
    assert spec is not None
    package = sys.modules["ring_flash_attn"] = types.ModuleType("ring_flash_attn")
    package.__path__ = list(spec.submodule_search_locations or ())
    from ring_flash_attn.ring_flash_attn import ring_flash_attn_func
    from ring_flash_attn.ring_flash_attn_varlen import ring_flash_attn_varlen_func
    from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func

    def work(rank: int) -> dict[str, list[float]]:
        found = {}
        for causal in (False, True):
            found[f"ring, causal {causal}"] = distances(
                lambda *x, causal=causal: ring_flash_attn_func(*x, causal=causal), causal=causal, parts=contiguous
            )
        found["zigzag"] = distances(lambda *x: zigzag_ring_flash_attn_func(*x, causal=True), causal=True, parts=zigzag)

        def packed(*tensors: Tensor) -> Tensor:
            ends = torch.tensor([0, 32], dtype=torch.int32)
            out = ring_flash_attn_varlen_func(*(t[0] for t in tensors), ends, 32, causal=True)
            return (out[0] if isinstance(out, tuple) else out)[None]

        found["concatenated"] = distances(packed, causal=True, parts=contiguous)
        return found

    judge(work)


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
