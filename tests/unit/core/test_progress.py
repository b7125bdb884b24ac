"""A caller's function between the blocks of a call."""

from __future__ import annotations

import threading

import pytest
import torch

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.observe.progress import between_blocks, this_thread

TILES = AttentionConfig(route="tiled", q_block=32, kv_block=64)


class Stopped(BaseException):
    """Stands for an interrupt, which some hosts derive from BaseException."""


def _qkv(length: int = 128, heads: int = 2) -> torch.Tensor:
    return torch.randn(1, heads, length, 16)


def test_every_block_reports_its_share_and_the_last_is_the_whole() -> None:
    seen: list[tuple[int, int]] = []
    query = _qkv()
    with between_blocks(lambda done, total: seen.append((done, total))):
        out = sdpa(query, query, query, config=TILES)
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert [done for done, _ in seen] == list(range(1, totals.pop() + 1))
    assert len(seen) >= 4
    assert torch.equal(out, sdpa(query, query, query, config=TILES))


def test_what_the_checkpoint_raises_ends_the_call_and_the_next_is_clean() -> None:
    query = _qkv()
    expected = sdpa(query, query, query, config=TILES)
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped), between_blocks(stop):
        sdpa(query, query, query, config=TILES)
    assert seen == [1, 2]
    assert this_thread.checkpoint is None
    assert torch.equal(sdpa(query, query, query, config=TILES), expected)


def test_torch_called_head_by_head_has_blocks_too() -> None:
    query, key = _qkv(256, heads=8), _qkv(256, heads=2)
    mask = torch.rand(256, 256) < 0.5
    seen: list[tuple[int, int]] = []
    config = AttentionConfig(route="torch", budget_mib=0.0625)
    with between_blocks(lambda done, total: seen.append((done, total))):
        sdpa(query, key, key, mask, enable_gqa=True, config=config)
    assert len(seen) > 1
    assert seen[-1] == (len(seen), len(seen))


def test_it_is_this_threads_alone_and_nests() -> None:
    seen: list[str] = []
    query = _qkv()
    with between_blocks(lambda *_: seen.append("outer")):
        other = threading.Thread(target=lambda: sdpa(query, query, query, config=TILES))
        other.start()
        other.join()
        assert seen == []
        with between_blocks(lambda *_: seen.append("inner")):
            sdpa(query, query, query, config=TILES)
        assert set(seen) == {"inner"}
        sdpa(query, query, query, config=TILES)
    assert set(seen) == {"inner", "outer"}
