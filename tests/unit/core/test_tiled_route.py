"""The route tiled when the device runs out of memory, and what it remembers."""

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import tiled as tiled_route

TILED = AttentionConfig(route="tiled")


class Device:
    """Stands in for a device with little memory: tiled work fails while its plan takes more than ``free`` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int):
        self.free, self.tried = free, {"forward": [], "backward": []}
        for name in self.tried:
            original = getattr(tiled_route, f"tiled_{name}")
            monkeypatch.setattr(tiled_route, f"tiled_{name}", self._limited(name, original))

    def _limited(self, name, original):
        def run(call, walk, *args, **options):
            self.tried[name].append(walk.tiles.extra_bytes)
            if walk.tiles.extra_bytes > self.free:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            return original(call, walk, *args, **options)

        return run


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    return [torch.randn(1, 4, 1024, 32) for _ in range(3)]


def test_out_of_memory_means_half_the_memory_until_it_fits(monkeypatch, qkv, caplog) -> None:
    device = Device(monkeypatch, free=1 << 19)
    with record() as report, caplog.at_level(logging.WARNING, logger="pascal_attn"):
        out = sdpa(*qkv, config=TILED)
    torch.testing.assert_close(out, reference_sdpa(*qkv)[0], atol=1e-6, rtol=1e-5)
    tried = device.tried["forward"]
    assert len(tried) >= 2
    assert all(0.4 < later / earlier < 0.55 for earlier, later in itertools.pairwise(tried))
    assert tried[-1] > 0.4 * device.free
    (stats,) = report.calls.values()
    assert stats.budget_halvings == len(tried) - 1 == len(caplog.records)
    assert "budget halved" in report.text()
    assert "[1, 4, 1024, 32]" in caplog.records[0].getMessage()


def test_a_shape_that_ran_out_once_starts_small_until_it_is_forgotten_and_others_do_not(monkeypatch, qkv) -> None:
    device = Device(monkeypatch, free=1 << 19)
    sdpa(*qkv, config=TILED)
    last = device.tried["forward"][-1]
    device.tried["forward"].clear()
    with record() as report:
        for _ in range(3):
            sdpa(*qkv, config=TILED)
    assert device.tried["forward"] == [last] * 3
    (stats,) = report.calls.values()
    assert stats.budget_halvings == 0  # nothing ran out in these calls
    device.free = 1 << 40
    sdpa(*(t[:, :3] for t in qkv), config=TILED)
    assert device.tried["forward"][-1] > 1 << 19
    tiled_route.forget_halvings()
    sdpa(*qkv, config=TILED)
    assert device.tried["forward"][-1] > 1 << 19


def test_the_budget_comes_back_after_a_minute(monkeypatch, qkv) -> None:
    now = 1000.0
    monkeypatch.setattr(tiled_route, "time", SimpleNamespace(monotonic=lambda: now))
    device = Device(monkeypatch, free=1 << 40)
    sdpa(*qkv, config=TILED)
    (full,) = device.tried["forward"]
    device.free = full // 3
    sdpa(*qkv, config=TILED)
    least = device.tried["forward"][-1]
    assert least < full // 3
    device.free = 1 << 40
    for seconds, tried in ((30.0, least), (31.0, full), (1.0, full)):
        now += seconds
        sdpa(*qkv, config=TILED)
        assert device.tried["forward"][-1] == tried


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_many_short_sequences_take_no_more_steps_with_one_row_of_mask_each(dtype) -> None:
    leaves = [torch.randn(200, 2, 16, 8, requires_grad=True) for _ in range(3)]
    keep = torch.rand(200, 1, 1, 16) > 0.3
    keep[..., 0] = True
    mask = keep if dtype == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, -1e9)
    found, blocks = [], []
    for each in (mask, mask.expand(200, 2, 1, 16).contiguous()):
        with record() as report:
            out = sdpa(*leaves, each, config=TILED)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        blocks.append(next(iter(report.calls.values())).blocks)
    assert blocks[0] == blocks[1]
    torch.testing.assert_close(found[0][0], reference_sdpa(*leaves, mask)[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("forced", "most"), [({}, 29), ({"q_block": 512, "kv_block": 512}, 1)])
def test_without_any_memory_the_error_is_the_devices_and_a_forced_tile_is_not_made_smaller(
    monkeypatch, qkv, forced: dict, most: int
) -> None:
    device = Device(monkeypatch, free=0)
    with pytest.raises(RuntimeError, match="cublasCreate"):
        sdpa(*qkv, config=AttentionConfig(route="tiled", **forced))
    tried = device.tried["forward"]
    assert len(set(tried)) == len(tried) <= most  # no plan is tried twice


def test_the_backward_pass_halves_on_its_own(monkeypatch, qkv) -> None:
    leaves = [t.requires_grad_() for t in qkv]
    out = sdpa(*leaves, config=TILED)
    device = Device(monkeypatch, free=1 << 19)
    actual = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(reference_sdpa(*leaves)[0].square().sum(), leaves)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert len(device.tried["backward"]) >= 2
    device.free = 1 << 40
    sdpa(*leaves, config=TILED)
    assert device.tried["forward"][-1] > 1 << 19


def test_the_dropout_of_a_repeated_call_is_that_of_the_first_try(monkeypatch, qkv) -> None:
    torch.manual_seed(4)
    expected = sdpa(*qkv, None, 0.5, config=TILED)
    Device(monkeypatch, free=1 << 19)
    torch.manual_seed(4)
    torch.testing.assert_close(sdpa(*qkv, None, 0.5, config=TILED), expected, atol=1e-6, rtol=1e-5)


def _tokens_first(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2)


def test_a_walk_is_never_used_for_another_layout_of_the_same_shapes() -> None:
    """Every kind twice in mixed order, so that each finds the walks of the others."""
    for layouts in 2 * list(itertools.product((torch.randn, _tokens_first), repeat=3)):
        tensors = [make((2, 4, 70, 8)) for make in layouts]
        for mask in (None, torch.rand(70, 70) < 0.5, (torch.rand(70, 70) < 0.5).T, torch.rand(2, 1, 1, 70) < 0.9):
            expected = reference_sdpa(*tensors, mask)[0]
            torch.testing.assert_close(sdpa(*tensors, mask, config=TILED), expected, atol=1e-6, rtol=1e-5)
