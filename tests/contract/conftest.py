"""Here torch is as bad as any: its products are those of MPS, and fresh memory holds NaN."""

from collections.abc import Iterator

import pytest
import torch
from attn_support import mps


@pytest.fixture(autouse=True)
def _products_of_mps_and_dirty_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for product in (mps.baddbmm, mps.bmm):
        monkeypatch.setattr(torch, product.__name__, product)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated without values
    yield
    torch.use_deterministic_algorithms(False)
