"""This module has what all tests of the process-wide switch need: torch's function, put back after each."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pascal_attn_core import AttentionConfig, record
from pascal_attn_core.patching.interception import TORCH_SDPA as TORCH
from pascal_attn_core.sdpa_patch import disable

TILED = AttentionConfig(route="tiled")


@pytest.fixture(autouse=True)
def torch_stays_torch() -> Iterator[None]:
    assert F.scaled_dot_product_attention is TORCH
    yield
    disable()
    assert F.scaled_dot_product_attention is TORCH


def qkv(heads: int = 2, tokens: int = 12, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, heads, tokens, dim, dtype=dtype) for _ in range(3)]


def served(function: Any, *args: Any, **options: Any) -> bool:
    """Whether a call comes to us."""
    with record() as seen:
        function(*args, **options)
    return seen.total > 0
