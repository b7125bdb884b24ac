"""The machine that executes gfx9 and gfx10 code: what the results of whole kernels that clang compiled do not show."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_support.amd.code import EXEC, instruction
from attn_support.amd.machine import OPERATIONS
from attn_support.amd.memory import Memory, OutsideOfMemory
from attn_support.amd.together import rows_of_products
from attn_support.amd.wave import POISON, Wave

LANES = np.arange(64, dtype=np.uint32)


@pytest.fixture
def wave() -> Wave:
    return Wave(0, Memory(()), np.full(64, POISON, np.uint32), [])


@pytest.fixture
def half_wave() -> Wave:
    """A wave of gfx10."""
    return Wave(1, Memory(()), np.full(64, POISON, np.uint32), [], size=32)


def _do(wave: Wave, *texts: str) -> None:
    for text in texts:
        name, _, rest = text.partition(" ")
        OPERATIONS[name.removesuffix("_e32").removesuffix("_e64")](wave, instruction(name, rest, 0))


def test_lanes_read_from_lanes(wave: Wave) -> None:
    """An answer is there after the wait, and 0 from lanes that are not active."""
    wave.vectors[1] = 4 * (LANES[::-1])
    _do(wave, "ds_bpermute_b32 v2, v1, v0")
    assert (wave.vectors[2] == POISON).all()
    _do(wave, "s_waitcnt lgkmcnt(0)")
    assert (wave.vectors[2] == LANES[::-1]).all()
    wave.write_scalar64(EXEC, (1 << 32) - 1)
    _do(wave, "ds_bpermute_b32 v3, v1, v0", "s_waitcnt lgkmcnt(0)")
    assert (wave.vectors[3][:32] == 0).all()
    assert (wave.vectors[3][32:] == POISON).all()


def test_a_wait_delivers_the_oldest_first(wave: Wave) -> None:
    wave.vectors[1] = 0
    wave.lds[:2] = 11, 12
    _do(wave, "ds_read_b32 v2, v1", "ds_read_b32 v3, v1 offset:4", "s_waitcnt lgkmcnt(1)")
    assert (wave.vectors[2] == 11).all()
    assert (wave.vectors[3] == POISON).all()
    _do(wave, "s_waitcnt vmcnt(0)")
    assert (wave.vectors[3] == POISON).all()
    _do(wave, "s_waitcnt lgkmcnt(0)")
    assert (wave.vectors[3] == 12).all()


def test_shared_memory_ends(wave: Wave) -> None:
    wave.vectors[1] = 4 * LANES
    with pytest.raises(AssertionError, match="behind the block's shared memory"):
        _do(wave, "ds_read_b64 v[2:3], v1")


def test_a_conversion_writes_one_half_of_a_word(wave: Wave) -> None:
    wave.vectors[1], wave.vectors[2] = (np.float32(x).view(np.uint32) for x in (1.5, -2.0))
    high = "dst_sel:WORD_1 dst_unused:{} src0_sel:DWORD"
    _do(wave, "v_cvt_f16_f32_e32 v3, v1", f"v_cvt_f16_f32_sdwa v3, v2 {high.format('UNUSED_PRESERVE')}")
    assert (wave.vectors[3].view(np.float16).reshape(-1, 2) == [1.5, -2.0]).all()
    _do(wave, f"v_cvt_f16_f32_sdwa v3, v2 {high.format('UNUSED_PAD')}")
    assert (wave.vectors[3].view(np.float16).reshape(-1, 2) == [0.0, -2.0]).all()
    with pytest.raises(NotImplementedError):
        _do(wave, f"v_cvt_f16_f32_sdwa v3, v2 {high.format('UNUSED_SEXT')}")


# ---- waves of 32 lanes -----------------------------------------------------------------------------------------------


def test_a_wave_of_32_lanes_has_masks_of_one_register(half_wave: Wave) -> None:
    wave = half_wave
    assert (wave.vectors[0] == LANES[:32] + 32).all()
    _do(wave, "s_mov_b32 s5, 7", "v_cmp_gt_u32_e64 s4, 40, v0")
    assert (wave.scalars[4], wave.scalars[5]) == (0xFF, 7)
    _do(wave, "s_and_saveexec_b32 s6, s4")
    assert (wave.scalars[6], wave.exec) == (0xFFFFFFFF, 0xFF)
    _do(wave, "v_mov_b32_e32 v1, 3", "v_cndmask_b32_e64 v1, v1, 9, s5")
    assert wave.vectors[1][:9].tolist() == [9, 9, 9, 3, 3, 3, 3, 3, POISON]
    _do(wave, "v_cmpx_eq_u32_e32 9, v1")
    assert wave.exec == 7
    _do(wave, "s_or_b32 exec_lo, exec_lo, s6", "v_mbcnt_lo_u32_b32 v2, -1, 5", "v_mbcnt_hi_u32_b32 v2, -1, v2")
    assert (wave.vectors[2] == LANES[:32] + 5).all()


def test_a_mask_of_64_lanes_is_none_of_32(half_wave: Wave, wave: Wave) -> None:
    with pytest.raises(AssertionError):
        _do(half_wave, "s_and_saveexec_b64 s[6:7], vcc")
    with pytest.raises(AssertionError):
        _do(wave, "s_and_saveexec_b32 s6, vcc_lo")


def test_stores_of_gfx10_are_counted_apart(half_wave: Wave) -> None:
    tensor = torch.zeros(64, dtype=torch.int32)
    wave = half_wave
    wave.memory = Memory([tensor])
    wave.write_scalar64(2, tensor.data_ptr())
    _do(wave, "v_lshlrev_b32_e32 v1, 2, v0", "global_store_dword v1, v0, s[2:3]")
    assert [len(wave.transfers[name]) for name in ("vmcnt", "vscnt")] == [0, 1]
    _do(wave, "s_waitcnt_vscnt null, 0x0")
    assert not wave.transfers["vscnt"]
    assert tensor[32:].tolist() == list(range(32, 64))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_its_tensors() -> None:
    tensor = torch.arange(8, dtype=torch.int32)
    memory = Memory([tensor[2:6]])
    address = np.array([tensor.data_ptr() + 8], np.uint64)
    assert memory.read(address, 16).view(np.int32).tolist() == [[2, 3, 4, 5]]
    memory.write(address, np.array([[9]], np.int32).view(np.uint8))
    assert tensor.tolist() == [0, 1, 9, 3, 4, 5, 6, 7]
    for outside in (address - np.uint64(4), address + np.uint64(4)):
        with pytest.raises(OutsideOfMemory):
            memory.read(outside, 16)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        instruction("v_add_f32", "v1, v2, v3 quad_perm:[1,0,3,2]", 0)


@pytest.mark.parametrize("exec_mask", [(1 << 64) - 1, 0x00FF00FF12345678])
@pytest.mark.parametrize("name", ["v_fmac_f32 v{}, v{}, v{}", "v_dot2_f32_f16 v{0}, v{1}, v{2}, v{0}"])
def test_products_at_once_are_those_one_by_one(wave: Wave, name: str, exec_mask: int) -> None:
    """Products agree also where the fourth reads what the second has written, and the last writes that again."""
    numbers = [(10, 20, 21), (11, 20, 22), (12, 20, 23), (13, 11, 23), (14, 21, 22), (15, 24, 24), (11, 21, 22)]
    row = [instruction(*name.format(*three).split(" ", 1), 0) for three in numbers]
    operations = [OPERATIONS[i.name] for i in row]
    found = rows_of_products(row, operations)
    assert [a is not b for a, b in zip(found, operations)] == [True, False, False, True, False, False, False]
    start = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).half().repeat_interleave(2, 1)
    after = []
    for chosen in (operations, found):
        wave.vectors[:] = start.numpy().view(np.uint32)
        wave.write_lanes(EXEC, exec_mask)
        wave.place = 0
        while wave.place < len(row):
            wave.place += 1
            with np.errstate(invalid="ignore"):
                chosen[wave.place - 1](wave, row[wave.place - 1])
        after.append(wave.vectors.copy())
    assert (after[0] == after[1]).all()
    assert (after[0][10:16] != start.numpy().view(np.uint32)[10:16]).any(axis=1).all()
