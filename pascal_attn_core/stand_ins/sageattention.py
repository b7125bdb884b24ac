"""SageAttention's functions, exact: its 8-bit kernels need compute capability 8.0, these run on any card and the CPU.

    from pascal_attn_core.stand_ins.sageattention import sageattn
    out = sageattn(q, k, v, tensor_layout="NHD", is_causal=True)

Names, layouts and defaults are those of sageattention 2.2; any head_dim, float32 and float64, masks and gradients work
too. :func:`patch_sageattention` makes ``import sageattention`` find them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention import sdpa, sdpa_with_lse
from ..config import AttentionConfig, UnsupportedAttention, config_of
from ..flash_attn.options import TOKENS, FlashOptions, check_layout
from ..flash_attn.varlen import varlen_attend
from ..patching.patch import Patch
from ..patching.stand_in import Around, Installer, StandIn

__all__ = ["install_as_sageattention", "patch_sageattention", "sageattn", "sageattn_varlen"]

_ROOT = "sageattention"
_PROVIDED = f"{_ROOT}==2.2.0"
_LAYOUTS = {"HND": ("B", "heads", "tokens", "head_dim"), "NHD": TOKENS}
_KERNELS = ("pv_fp16_cuda", "pv_fp16_triton", "pv_fp8_cuda", "pv_fp8_cuda_sm90")
_NAMES = ".sageattention: get_cuda_arch_versions sageattn sageattn_varlen " + " ".join(
    f"sageattn_qk_int8_{kernel}=sageattn" for kernel in _KERNELS
)
_installer = Installer(_ROOT, "config")


def _exact_where_8_bits_do_not(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(*args: Any, config: AttentionConfig | None = None, **options: Any) -> Any:
        try:
            return function(*args, config=config, **options)
        except UnsupportedAttention:
            if config is None or config.route != "fused-int8":
                raise
        return function(*args, config=dataclasses.replace(config, route="auto"), **options)

    return attend


@_exact_where_8_bits_do_not
def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    **ignored: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q over k and v.

    Args:
        q: ``[B, Hq, L, D]`` with ``tensor_layout`` "HND", ``[B, L, Hq, D]`` with "NHD"; k and v likewise, Hq a multiple
            of Hkv. float16, bfloat16, float32 or float64.
        is_causal: query i sees the keys up to i.
        sm_scale: factor of the scores; None = ``scale``, and that None = 1 / sqrt(D).
        attn_mask, dropout_p, scale: as in :func:`pascal_attn_core.sdpa`, for programs that put this function into the
            place of torch's; sageattention ignores them, or supports them in one of its kernels.
        config: how to compute; None = the default. Its route "fused-int8" is the only one that is not exact; calls that
            it does not take are computed exactly.
        ignored: ``smooth_k``, ``pv_accum_dtype`` and what else concerns how sageattention quantises.
    Returns:
        In the layout of q; with ``return_lse`` (out, lse ``[B, Hq, L]``, natural logarithm).
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments; nothing has been computed.
    """
    if tensor_layout not in _LAYOUTS:
        raise ValueError(f"tensor_layout must be one of {list(_LAYOUTS)}, got {tensor_layout!r}")
    check_layout(_LAYOUTS[tensor_layout], q=q, k=k, v=v)
    tokens_first = tensor_layout == "NHD"
    query, key, value = (t.transpose(1, 2) if tokens_first else t for t in (q, k, v))
    given: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "config": config}
    given |= {"scale": scale if sm_scale is None else sm_scale, "enable_gqa": True}
    result = (sdpa_with_lse if return_lse else sdpa)(query, key, value, **given)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.transpose(1, 2).contiguous() if tokens_first else out
    return out if lse is None else (out, lse)


@_exact_where_8_bits_do_not
def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    sm_scale: float | None = None,
    *,
    config: AttentionConfig | None = None,
    **ignored: Any,
) -> Tensor:
    """:func:`sageattn` within each of several concatenated sequences; nothing is padded.

    Args:
        q: ``[total_q, Hq, D]``; k ``[total_k, Hkv, D]``; v ``[total_k, Hkv, Dv]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``, where each sequence starts and the last one ends.
        max_seqlen_q, max_seqlen_k: ignored; the lengths determine them.
    Returns:
        ``[total_q, Hq, Dv]``.
    """
    options = FlashOptions(0.0, is_causal, sm_scale, "upper_left", config=config)
    out, _ = varlen_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options, with_lse=False)
    return out


def get_cuda_arch_versions() -> list[str]:
    """``["sm75"]``: the architecture of each CUDA device."""
    return ["sm{}{}".format(*torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())]


def patch_sageattention(
    config: AttentionConfig | None = None, *, replace: bool | None = None, around: Around | None = None
) -> Patch:
    """Make ``import sageattention`` find our functions, all exact: ``sageattn``, which the names ``sageattn_qk_int8_*``
    mean too, and ``sageattn_varlen``.

    Code that imported the name earlier, or found it missing, keeps what it found: call this first.
    Package metadata agrees (``importlib.metadata.version("sageattention")`` is ``"2.2.0+pascal..."``).

    Args:
        config: how they compute; None = the default. With ``AttentionConfig(route="fused-int8")`` in 8 bits, which is
            not exact: typical errors are 0.1 to 1.3 %; calls that 8 bits do not take are computed exactly.
        replace: whether ours take the place of a real package that is installed; None = of one that cannot run on this
            machine's devices, which the log names.
        around: see :func:`pascal_attn_core.patch_flash_attn`.
    Returns:
        A Patch; ``.remove()`` restores what was there before.
    Raises:
        TypeError: config is no AttentionConfig.
        ValueError: config is another one than that of an installation in force.
        RuntimeError: a real package is installed and stays.
    """
    config_of(config)  # or raises
    return _installer.install(lambda: _stand_in(config, around), config, replace=replace)


install_as_sageattention = patch_sageattention


def _stand_in(config: AttentionConfig | None, around: Around | None) -> StandIn:
    def adapt(name: str, members: dict[str, Any]) -> None:
        for member in [member for member in members if config is not None and member.startswith("sageattn")]:
            members[member] = functools.partial(members[member], config=config)

    modules = {_ROOT: (_NAMES,), f"{_ROOT}.core": (_NAMES,)}
    package = __name__.rpartition(".")[0]
    given: dict[str, Any] = {"package": package, "eager": tuple(modules), "around": around, "counted": ("sageattn",)}
    return StandIn(_PROVIDED, modules, adapt=adapt, **given)
