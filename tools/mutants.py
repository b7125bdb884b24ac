"""Whether the tests notice a mistake in the kernels: the CUDA source with one place made wrong, under the tests.

    python tools/mutants.py                       all of them, some minutes each
    python tools/mutants.py int32_batch_offset    these

Each runs in a copy of the checkout, up to the first test that fails. Missing barriers are not among them:
tests named test_a_kernel_without_any_one_barrier_is_wrong remove each in turn. Nor are those of tensor_even.cuh,
PA_ALL and query_sums.cuh, which test_even.py and test_grad_all.py in tests/contract/fused have in every run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = Path("pascal_attn_core") / "fused" / "cuda"
COPIED = ("pascal_attn_core", "tests", "tools", "docs", "pyproject.toml")
TESTS = ("tests/contract/fused/test_geometries.py", "tests/contract/fused/test_emulation.py")
AMD_TESTS = ("tests/contract/fused/test_amd.py",)
CAPPED_TESTS = ("tests/contract/fused/test_capped.py",)
LINEAR_TESTS = ("tests/contract/fused/test_int8_linear.py",)
GRADIENT_TESTS = ("tests/contract/fused/test_tensor_gradients.py",)


@dataclass(frozen=True)
class Mutant:
    """One place of the source, and how it is made wrong.

    Attributes:
        file: in :data:`CUDA`.
        right: what stands there, once; wrong: what is put there.
        is_noticed: False: no number that a test could look at changes, or hardly.
        tests: files that should notice.
    """

    file: str
    right: str
    wrong: str
    is_noticed: bool = True
    tests: tuple[str, ...] = TESTS


def _gradient(right: str, wrong: str, file: str = "tensor_gradient.cu") -> Mutant:
    return Mutant(file, right, wrong, tests=GRADIENT_TESTS)


def _linear(right: str, wrong: str, *, is_noticed: bool = True) -> Mutant:
    return Mutant("int8_linear.cu", right, wrong, is_noticed, LINEAR_TESTS)


def _amd(right: str, wrong: str, file: str = "forward.cu", *, is_noticed: bool = True) -> Mutant:
    return Mutant(file, right, wrong, is_noticed, AMD_TESTS)


MUTANTS = {
    "tail_last_key": Mutant("masks.cuh", "min_int(cols - 1, distance + b.high)", "min_int(cols, distance + b.high)"),
    "window_low_edge": Mutant("masks.cuh", "first = distance + b.low;", "first = distance + b.low + 1;"),
    "band_cuts_high": Mutant("masks.cuh", "col0 + PA_BC - 1 > first + b.high", "col0 + PA_BC - 2 > first + b.high"),
    "band_cuts_low": Mutant("masks.cuh", "col0 < last + b.low", "col0 < last + b.low - 1"),
    "int32_batch_offset": Mutant("sequence.cuh", ": b * batch_stride;", ": (int)(b * (int)batch_stride);"),
    "int32_row_offset": Mutant(
        "product.cuh",
        "return first + (r < rows ? r : 0) * stride",
        "return first + (int)((r < rows ? r : 0) * (int)stride)",
    ),
    "one_row_buffer": Mutant("product.cuh", "#define ROW_BUFFERS 2", "#define ROW_BUFFERS 1"),
    "one_row_chunk": Mutant("product.cuh", "#if PA_KC < PA_D || PA_AMD", "#if PA_KC < PA_D - 48 || PA_AMD"),
    "one_column_buffer": Mutant("product.cuh", "#define COLUMN_BUFFERS 2", "#define COLUMN_BUFFERS 1"),
    "int32_part_offset": Mutant("forward.cu", "store_part(p, (((i64)at.split *", "store_part(p, (((int)at.split *"),
    "no_rescale_of_sums": Mutant("forward.cu", "            FOR(j, DN) O[i][j] *= fade;\n", ""),
    "no_rescale_of_row_sum": Mutant("forward.cu", "            row_sum[i] *= fade;\n", ""),
    "groups_interleaved": Mutant(
        "forward.cu", "at.hk = at.first_head / p.group;", "at.hk = at.first_head % (p.heads / p.group);"
    ),
    "lse_in_base_2": Mutant("forward.cu", "UNLIFTED(log2f(row_sum)) * LN2 : NEG_INF;", "log2f(row_sum) : NEG_INF;"),
    "strides_of_q_swapped": Mutant(
        "forward.cu", "at.head(xr) * p.qh + at.query(xr) * p.qs", "at.head(xr) * p.qs + at.query(xr) * p.qh"
    ),
    "v_takes_the_batch_stride_of_k": Mutant(
        "forward.cu", "p.v + sequence_at(p.cu_k, at.b, p.vb, p.vs)", "p.v + sequence_at(p.cu_k, at.b, p.kb, p.vs)"
    ),
    "v_takes_the_head_stride_of_k": Mutant(
        "forward.cu", "at.b, p.vb, p.vs) + at.hk * p.vh", "at.b, p.vb, p.vs) + at.hk * p.kh"
    ),
    "empty_row_is_not_zero": Mutant("forward.cu", "sum > 0.f ? 1.f / sum : 0.f, p.dim_v", "1.f / sum, p.dim_v"),
    "mask_takes_the_head_stride": Mutant("forward.cu", "row.at = place.b * p.mb", "row.at = place.b * p.mh"),
    "reference_is_nan": Mutant(
        "forward.cu",
        "reference[i] = row_max[i] == NEG_INF ? 0.f : row_max[i];  // a row",
        "reference[i] = row_max[i];  // a row",
    ),
    "merge_takes_the_first_maximum": Mutant(
        "combine.cuh",
        "best = fmaxf(best, p.part_max[s * total + row]);",
        "best = s ? best : p.part_max[row];",
    ),
    "merge_does_not_scale_sums": Mutant(
        "combine.cuh", "fmaf(p.part_sums[s * total + row], fade, sum)", "p.part_sums[s * total + row] + sum"
    ),
    "first_tile_ignored": Mutant("forward.cu", "at.row0 = (tile + p.first_tile) * PA_BR;", "at.row0 = tile * PA_BR;"),
    "first_batch_ignored": Mutant("forward.cu", "at.b = blockIdx.z + p.first_batch;", "at.b = blockIdx.z;"),
    "bfloat_truncated": Mutant("elements.cuh", "(u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)", "(u16)(u >> 16)"),
    "v_row_past_the_end": Mutant("product.cuh", "first + row < rows ?", "first + row <= rows ?"),
    "one_head_of_a_group": Mutant("grad_key_value.cu", "h < (hk + 1) * p.group; ++h", "h <= hk * p.group; ++h"),
    "delta_takes_the_sign_of_lse": Mutant("delta.cuh", "sum - (p.grad_lse", "sum + (p.grad_lse"),
    "flushed_sums_not_scaled": Mutant(
        "forward.cu", "add_flushed(O[i], row, fade_of_flushed(before, row_max[i])", "add_flushed(O[i], row, 1.f"
    ),
    "flushed_sums_not_scaled_at_the_end": Mutant(
        "forward.cu", "add_flushed(O[i], o, fade_of_flushed(before, row_max[i])", "add_flushed(O[i], o, 1.f"
    ),
    "flushed_maximum_of_another_row": Mutant("forward.cu", "(anew(t).tid & 1) | i << 1", "anew(t).tid & 1"),
    "flushed_maximum_of_the_first_time": Mutant(
        "forward.cu", "if (t.tx == i) flushed_max =", "if (t.tx == i && !is_flushed(flushed_max)) flushed_max ="
    ),
    "flushed_sums_forgotten": Mutant(
        "forward.cu", "if (is_flushed(before)) add_flushed(O[i], row", "if (0) add_flushed(O[i], row"
    ),
    "flushed_sums_forgotten_at_the_end": Mutant(
        "forward.cu", "if (is_flushed(before)) add_flushed(O[i], o,", "if (0) add_flushed(O[i], o,"
    ),
    "pairs_keep_no_lift": _amd("#define LIFT 7.f", "#define LIFT 0.f", "amd_softmax.cuh", is_noticed=False),
    "pairs_sum_what_is_rounded": _amd(
        "            sum += S[i][j];",
        "            sum += PA_PAIRS == 2 ? half_to_float(float_to_half(S[i][j])) : S[i][j];",
        "amd_softmax.cuh",
    ),
    "amd_lanes_of_a_row_do_not_meet": _amd(
        "FOR(s, 4) if ((2 << s) <= PA_TX) mx =", "FOR(s, 0) if ((2 << s) <= PA_TX) mx =", "amd_softmax.cuh"
    ),
    "amd_empty_row_begins_with_zero": _amd("bits_to_float(0xff7fffffu)", "bits_to_float(0u)", "amd_softmax.cuh"),
    "amd_sums_keep_the_old_reference": _amd("FOR(j, DN) O[i][j] *= fade;", "", "amd_softmax.cuh"),
    "ranges_are_all_the_first": _amd("at.split = (int)blockIdx.x - tile * p.splits;", "at.split = 0;"),
    "pair_gradients_stay_lifted": _amd(
        "store_gradient(dv, p.dvs, dV, PROB_UNIT,", "store_gradient(dv, p.dvs, dV, 1.f,", "grad_key_value.cu"
    ),
    "pairs_lse_is_lifted": _amd("UNLIFTED(log2f(row_sum))", "log2f(row_sum)"),
    "pairs_take_the_next_row_twice": _amd("upper.at += y.stride;", "upper.at += 0;", "product.cuh"),
    "pairs_row_past_the_end": _amd("row + 1 < rows ?", "row < rows ?", "product.cuh"),
    "kept_tile_is_one_chunk": _amd("r.Xs += TO_WORDS(PA_KC) * PA_BR;", "", "product.cuh"),
    "sink_is_not_in_the_sum": Mutant(
        "forward.cu", "row_sum += exp2_approx((in_unit", "row_sum += 0 * exp2_approx((in_unit", tests=CAPPED_TESTS
    ),
    "cap_of_half_the_score": Mutant(
        "forward.cu", "S[i][j] * tanh_scale)", "S[i][j] * 0.5f * tanh_scale)", tests=CAPPED_TESTS
    ),
    "sink_is_not_lifted": Mutant("forward.cu", "* UNIT_TO_LOG2 + LIFT);", "* UNIT_TO_LOG2);", tests=CAPPED_TESTS),
    "gradient_tail_key": _gradient("min_int(at.length() - 1 - col0, distance", "min_int(at.length() - col0, distance"),
    "gradient_window_low_edge": _gradient("first = distance + at.low();", "first = distance + at.low() + 1;"),
    "gradient_band_cuts_high": _gradient("col0 + PA_SC - 1 > at.row0()", "col0 + PA_SC - 2 > at.row0()"),
    "gradient_stats_of_the_tile_before": _gradient("stats[place ^ 1][t.tid / PA_BC]", "stats[place][t.tid / PA_BC]"),
    "gradient_stats_of_one_head": _gradient("(at.head() * p.group + s.head) * p.lh", "at.head() * p.group * p.lh"),
    "gradient_queries_that_do_not_exist": _gradient("== 2 ? 2 : 0) ? POS_INF : 0.f", "== 2 ? 2 : 0) ? 0.f : 0.f"),
    "gradient_probs_not_scaled_back": _gradient("dXX, PROB_UNIT, at.rows()", "dXX, 1.f, at.rows()"),
    "gradient_delta_takes_the_sign_of_lse": _gradient("(sum - (p.grad_lse", "(sum + (p.grad_lse"),
    "gradient_words_of_the_tile_before": _gradient("words[place ^ 1][t.tid] = word", "words[place][t.tid] = word"),
    "gradient_flags_of_one_head": _gradient(
        "query_head(p, at, head) * p.flags_h", "query_head(p, at, 0) * p.flags_h", "gradient_masks.cuh"
    ),
    "gradient_left_operand_of_the_next_piece": _gradient(
        "panel_piece(row, n, c) ^ 16u", "panel_piece(row, n, c) ^ 0u", "turing_gradient.cuh"
    ),
    "gradient_first_tile_ignored": _gradient(
        "at.row0 = ((int)blockIdx.x + p.first_tile) * PA_BR", "at.row0 = (int)blockIdx.x * PA_BR", "tensor_gradient.cuh"
    ),
    "gradient_without_the_slope_of_the_softcap": _gradient("fmaf(-s, s, 1.f)", "1.f"),
    "gradient_scaled_by_the_softcap": _gradient(
        "dX, p.grad_scale, at.rows(), p.dim, t);\n#endif", "dX, p.scale, at.rows(), p.dim, t);\n#endif"
    ),
    "volta_sides_have_each_others_keys": _gradient("(side_of(t) ^ s) * 4", "side_of(t) * 4", "volta.cuh"),
    "volta_left_over_pieces_of_one_half": Mutant(
        "volta.cuh", "side_of(t)) + upper * 8", "side_of(t))", tests=("tests/contract/fused/test_tensor.py",)
    ),
    "volta_lanes_keep_the_other_row": _gradient("= t.lane & 2;  // this", "= !(t.lane & 2);  // this", "volta.cuh"),
    "volta_right_operand_of_one_side": _gradient(
        "t.lane / 16 * 8 + t.lane % 8", "t.lane / 16 * 8 + t.lane % 4", "volta.cuh"
    ),
    "linear_gates_are_the_values": _linear("(is_gate ? p.cols : 0)", "0"),
    "linear_gate_of_the_same_row": _linear("(r + EACH / 2) % EACH", "r"),
    "linear_last_words_of_a_row": _linear("least(w, p.words - 4)", "least(w, p.words - 8)"),
    "linear_last_word_of_a_row": _linear("least(w + 3, p.words - 1)", "least(w + 3, p.words - 2)"),
    "linear_int32_offset": _linear("(i64)weight_row(p, n0, r, EACH) * p.words", "weight_row(p, n0, r, EACH) * p.words"),
    "linear_int32_row_of_x": _linear("const i64 row = blockIdx.x;", "const int row = blockIdx.x * (int)p.row_stride;"),
    "linear_nan_is_no_maximum": _linear("bits > most ? bits", "bits > most && bits <= 0x7f800000u ? bits"),
    "linear_codes_by_the_reciprocal": _linear(
        "    q = fmaf(fmaf(-q, s, x), r, q);\n    return fmaf(", "    return q; fmaf("
    ),
    # One correction is right for all but very few numbers.
    "linear_codes_by_one_correction": _linear("    q = fmaf(fmaf(-q, s, x), r, q);\n", "", is_noticed=False),
    "linear_rotation_of_other_lanes": _linear("rotated_across(v[j][i], 4)", "rotated_across(v[j][i], 2)"),
    "linear_rotation_in_another_order": _linear(
        "(v[0][i] + near) + (v[1][i] + far)", "(v[0][i] + v[1][i]) + (near + far)"
    ),
    "linear_scales_in_another_order": _linear(
        "__fmul_rn(__int2float_rn(sum), __fmul_rn(x_scale, scale))",
        "__fmul_rn(__fmul_rn(__int2float_rn(sum), x_scale), scale)",
    ),
    "linear_first_tile_ignored": _linear("(int)blockIdx.x + p.first_tile, band", "(int)blockIdx.x, band"),
    "linear_first_tile_ignored_by_few_rows": _linear("((int)blockIdx.x + p.first_tile) * FEW", "(int)blockIdx.x * FEW"),
    "linear_last_band_is_whole": _linear("least(BAND, p.row_tiles - band * BAND)", "BAND"),
    "linear_long_rows_are_read_once": _linear("is_long = round < p.columns", "is_long = false"),
    "linear_words_behind_a_row": _linear("row0 + m < p.rows && w < p.x_words", "row0 + m < p.rows"),
    "linear_sums_of_the_next_row": _linear("sums[r][j] = sums[r + 1][j]", "sums[r][j] = sums[7][j]"),
    "linear_scale_of_zero": _linear("if (scale < LEAST_SCALE) scale = LEAST_SCALE;", ""),
    "scores_kept_far_too_long": Mutant("forward.cu", "#define SLACK 8.f", "#define SLACK 100.f", is_noticed=False),
    "scores_never_kept": Mutant("forward.cu", "#define SLACK 8.f", "#define SLACK 0.f", is_noticed=False),
}


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file.

    Raises:
        ValueError: the place is not there, or not once.
    """
    text = (root / CUDA / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.right)} times {mutant.right!r}, want one")
    return text.replace(mutant.right, mutant.wrong)


def first_failure(mutant: Mutant, tests: list[str]) -> str:
    """The first test that fails, "" if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        (copy / CUDA / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if lines:
        return lines[0].removeprefix("FAILED ").split(" - ")[0]
    if done.returncode < 0:
        return f"the tests ended with signal {-done.returncode}"  # an address that nothing lies at
    raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTANTS)}")
    parser.add_argument("--tests", nargs="+", help="files or tests, instead of each one's own")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in MUTANTS]
    if unknown:
        parser.error(f"there is no mutant {', '.join(unknown)}; there are {', '.join(MUTANTS)}")
    missed = []
    for name in arguments.names or MUTANTS:
        begin = time.monotonic()
        test = first_failure(MUTANTS[name], list(arguments.tests or MUTANTS[name].tests))
        if not test and MUTANTS[name].is_noticed:
            missed.append(name)
        print(f"{name:32} {time.monotonic() - begin:5.0f} s  {test or 'not noticed'}", flush=True)
    if missed:
        raise SystemExit(f"not noticed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
