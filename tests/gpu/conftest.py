"""A file of this folder is, without a CUDA GPU, not even imported."""

from pathlib import Path

import pytest
import torch


class NeedsGpu(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs a CUDA GPU, and torch.cuda.is_available() is False", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else NeedsGpu.from_parent(parent, path=module_path)
