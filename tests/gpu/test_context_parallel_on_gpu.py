"""One call over two cards, by NCCL, gives what one card gives."""

import pytest
import torch
import torch.distributed as dist
from attn_support import fresh
from attn_support.parallel.processes import run_in

from pascal_attn_core import sdpa
from pascal_attn_core.parallel import context_parallel_sdpa

pytestmark = pytest.mark.gpu


def _two_cards() -> None:
    def work(rank: int) -> dict[str, float]:
        found = {}
        for how in ("ring", "ulysses"):
            for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 5e-3)):
                draws = torch.Generator("cuda").manual_seed(0)
                query, key, value, grad = (
                    torch.randn(1, 8, 2048, 64, device="cuda", dtype=dtype, generator=draws) for _ in range(4)
                )
                leaves = [t.clone().requires_grad_() for t in (query, key, value)]
                out = sdpa(*leaves, is_causal=True)
                right = [out, *torch.autograd.grad(out, leaves, grad)]
                own = slice(1024 * rank, 1024 * rank + 1024)
                parts = [t[:, :, own].clone().requires_grad_() for t in (query, key, value)]
                out = context_parallel_sdpa(*parts, is_causal=True, **{how: dist.group.WORLD})
                answers = [out, *torch.autograd.grad(out, parts, grad[:, :, own])]
                for name, one, other in zip(("out", "query", "key", "value"), answers, right):
                    error = (one - other[:, :, own]).abs().max().item() / other.abs().max().item()
                    found[f"{how} {dtype} {name}"] = error / limit
        return found

    for answer in run_in(2, work, backend="nccl"):
        assert isinstance(answer, dict), answer
        assert max(answer.values()) < 1, answer


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, found {torch.cuda.device_count()}")
def test_two_cards_give_what_one_gives() -> None:
    fresh.call(_two_cards)
