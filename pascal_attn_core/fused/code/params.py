"""The kernels' parameters as ctypes structures: field for field what the CUDA source declares."""

from __future__ import annotations

import ctypes

from ..geometry.tensor import MOST_PIECES

_POINTER, _I64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Params(ctypes.Structure):
    """Base of all parameter structures, made with fields by name; a field that is not set is zero."""


class Forward(Params):
    _fields_ = [
        *_fields(_POINTER, "q k v o mask lse log_sum part_sums part_max part_out cu_q cu_k"),
        *_fields(_I64, "qb qh qs kb kh ks vb vh vs ob oh os mb mh mq mk lb lh"),
        *_fields(_INT, "lq lk heads group batches low high lower_right dim dim_v mask_is_float32 splits"),
        *_fields(_INT, "first_tile first_batch"),
        *_fields(_FLOAT, "scale scale_log2"),
    ]


class CappedForward(Forward):
    _fields_ = [*_fields(_POINTER, "sinks"), *_fields(_FLOAT, "tanh_scale")]


class TensorForward(Params):
    _fields_ = [
        *_fields(_POINTER, "q k v o mask lse log_sum part_sums part_max part_out cu_q cu_k mask_bits flags sinks"),
        *_fields(_I64, "qb qh qs kb kh ks vb vh vs ob oh os mb mh mq mk lb lh"),
        *_fields(_I64, "bits_b bits_h bits_q flags_b flags_h flags_q"),
        *_fields(_INT, "lq lk heads group batches low high lower_right dim dim_v mask_is_float32 splits"),
        *_fields(_INT, "first_tile first_batch mask_heads mask_rows"),
        *_fields(_FLOAT, "scale scale_log2 tanh_scale"),
    ]


class TensorEven(TensorForward):
    _fields_ = [
        *_fields(_POINTER, "parts arrived"),
        *_fields(_INT, "row_tiles whole"),
        ("pieces", ctypes.c_uint * (2 * MOST_PIECES)),
    ]


class Pack(Params):
    _fields_ = [
        *_fields(_POINTER, "x mean words scales logs mean_scores"),
        *_fields(_I64, "xb xh xs"),
        *_fields(_INT, "rows heads group tiles dim"),
        *_fields(_FLOAT, "scale scale_log2"),
    ]


class Int8Attention(Params):
    _fields_ = [
        *_fields(_POINTER, "q q_scales k k_scales v v_scales v_logs mean mean_scores o lse mask mask_bits flags"),
        *_fields(_I64, "ob oh os lb lh mb mh mq mk bits_b bits_h bits_q flags_b flags_h flags_q"),
        *_fields(_INT, "lq lk heads group tiles dim_v low high first_tile first_batch"),
        *_fields(_INT, "mask_heads mask_rows mask_is_float32"),
    ]


class QuantizeRows(Params):
    _fields_ = [
        *_fields(_POINTER, "x words scales"),
        *_fields(_I64, "row_stride"),
        *_fields(_INT, "columns row_words rotation warps in_fours"),
    ]


class Linear(Params):
    _fields_ = [
        *_fields(_POINTER, "x x_scales weight scales bias out"),
        *_fields(_INT, "rows cols words x_words scale_step bias_kind activation is_gated in_fours"),
        *_fields(_INT, "row_tiles col_tiles first_tile"),
    ]


class GgufExpand(Params):
    _fields_ = [*_fields(_POINTER, "blocks out"), *_fields(_I64, "count"), *_fields(_INT, "out_kind wide_table")]


class GgufRound(Params):
    _fields_ = [
        *_fields(_POINTER, "x words scales"),
        *_fields(_I64, "row_stride"),
        *_fields(_INT, "rows columns chunks x_kind"),
    ]


class GgufLinear(Params):
    _fields_ = [
        *_fields(_POINTER, "x x_scales weight bias out"),
        *_fields(_I64, "row_bytes"),
        *_fields(_INT, "rows cols blocks chunks out_kind row_tiles col_tiles first_tile"),
    ]


class Backward(Params):
    _fields_ = [
        *_fields(_POINTER, "q k v o g dq dk dv mask lse log_sum grad_lse delta shift bits cu_q cu_k"),
        *_fields(
            _I64, "qb qh qs kb kh ks vb vh vs ob oh os gb gh gs dqb dqh dqs dkb dkh dks dvb dvh dvs mb mh mq mk lb lh"
        ),
        *_fields(
            _INT, "lq lk heads group batches low high lower_right dim dim_v mask_is_float32 first_tile first_batch"
        ),
        *_fields(_FLOAT, "scale scale_log2"),
    ]


class AllGradients(Backward):
    _fields_ = [
        *_fields(_POINTER, "sums"),
        *_fields(_I64, "sums_b sums_h sums_s"),
        *_fields(_POINTER, "turns begun"),
    ]


class TensorBackward(Backward):
    _fields_ = [
        *_fields(_POINTER, "mask_bits flags"),
        *_fields(_I64, "bits_b bits_h bits_q flags_b flags_h flags_q"),
        *_fields(_INT, "mask_heads mask_rows range range_end"),
        *_fields(_FLOAT, "tanh_scale grad_scale"),
    ]
