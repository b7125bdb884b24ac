"""xformers' attention and the small operators that models import beside it, on any card and the CPU.

    from pascal_attn_core.stand_ins.xformers import memory_efficient_attention
    out = memory_efficient_attention(q, k, v)          # [B, M, H, K], as in xformers

Names, layouts and masks are those of xformers 0.0.35; any dtype and head_dim, gradients in every form and of tensor
masks too. :func:`patch_xformers` makes ``import xformers`` find them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import sdpa
from ..call import FLOATS
from ..flash_attn.options import FlashOptions, attend, check_layout
from ..flash_attn.varlen import varlen_attend
from ..patching.patch import Patch
from ..patching.stand_in import Around, Installer, StandIn
from .attn_bias import AttentionBias, BlockDiagonalMask

__all__ = ["install_as_xformers", "memory_efficient_attention", "patch_xformers"]

# ComfyUI and its relatives ask for it and then stay with torch's attention: beside xformers they store expanded masks.
HAS_CPP_LIBRARY = False
_ROOT = "xformers"
_PROVIDED = f"{_ROOT}==0.0.35"
_ATTENTION = (
    ".xformers: memory_efficient_attention memory_efficient_attention_forward=memory_efficient_attention "
    "AttentionOp=AnyOp AttentionOpBase=AnyOp MemoryEfficientAttentionCkOp=ANY_OPS "
    "MemoryEfficientAttentionCutlassOp=ANY_OPS MemoryEfficientAttentionCutlassFwdFlashBwOp=ANY_OPS "
    "MemoryEfficientAttentionFlashAttentionOp=ANY_OPS",
    ".attn_bias: AttentionBias LowerTriangularMask",
    "..flash_attn.modules.absent: memory_efficient_attention_backward memory_efficient_attention_forward_requires_grad",
)
_OPS = (".xformers: FwOp=AnyOp BwOp=AnyOp",)
_SWIGLU = ".xformers: SwiGLU swiglu"
_MODULES: dict[str, tuple[str, ...]] = {
    _ROOT: (".xformers: _has_cpp_library=HAS_CPP_LIBRARY",),
    "xformers.version": (),
    "xformers.ops": (
        *_ATTENTION,
        ".attn_bias: AttentionMask=AttentionBias",
        ".xformers: RMSNorm",
        _SWIGLU,
        "..flash_attn.modules.absent: index_select_cat masked_matmul scaled_index_add",
        "torch: unbind",
    ),
    "xformers.ops.rmsnorm": (".xformers: RMSNorm",),
    "xformers.ops.swiglu_op": (_SWIGLU,),
    "xformers.ops.unbind": ("torch: unbind",),
    "xformers.ops.fmha": (*_ATTENTION, "types: Inputs=SimpleNamespace", ".attn_bias: BlockDiagonalMask"),
    "xformers.ops.fmha.attn_bias": (
        ".attn_bias: AttentionBias BlockDiagonalCausalFromBottomRightMask "
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask BlockDiagonalCausalLocalAttentionMask "
        "BlockDiagonalCausalMask BlockDiagonalMask LocalAttentionFromBottomRightMask "
        "LowerTriangularFromBottomRightLocalAttentionMask LowerTriangularFromBottomRightMask LowerTriangularMask "
        "LowerTriangularMaskWithTensorBias",
        "..flash_attn.modules.absent: BlockDiagonalCausalWithOffsetGappyKeysMask "
        "BlockDiagonalCausalWithOffsetPaddedKeysMask BlockDiagonalGappyKeysMask BlockDiagonalPaddedKeysMask",
    ),
    "xformers.ops.fmha.common": (
        ".xformers: AttentionBwOpBase=AnyOp AttentionFwOpBase=AnyOp AttentionOp=AnyOp",
        ".attn_bias: AttentionBias",
        "types: Inputs=SimpleNamespace",
    ),
    "xformers.ops.fmha.cutlass": _OPS,
    "xformers.ops.fmha.dispatch": ("..flash_attn.modules.absent: _dispatch_bw _dispatch_fw",),
    "xformers.ops.fmha.flash": _OPS,
}
_installer = Installer(_ROOT)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> Tensor:
    """Attention of query over key and value, exact, in O(N) memory.

    Args:
        query: ``[B, M, H, K]``, with key ``[B, Mkv, H, K]`` and value ``[B, Mkv, H, Kv]``. Or all three ``[B, M, K]``,
            one head; or ``[B, M, G, H, K]``, where keys and values that are expanded over H are not copied.
        attn_bias: a tensor that broadcasts to ``[B, H, M, Mkv]`` (``[B, M, Mkv]``, ``[B, G, H, M, Mkv]``) and is added
            to the scores, or one of the masks of :mod:`.attn_bias`. Within blocks nothing is padded; keys with gaps
            are copied without them.
        p: share of the probabilities that is dropped.
        scale: factor of the scores; None = 1 / sqrt(K).
        op: ignored: the route is chosen as for :func:`pascal_attn_core.sdpa`.
    Returns:
        The form of query with Kv for K, contiguous; zero where a query sees no key.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments; nothing has been computed.
    """
    if not (3 <= query.dim() <= 5 and query.dim() == key.dim() == value.dim()):
        raise ValueError(
            "query, key and value must all be [B, M, H, K], [B, M, K] or [B, M, G, H, K], got "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if not (attn_bias is None or isinstance(attn_bias, (Tensor, AttentionBias))):
        raise TypeError(f"attn_bias must be a tensor, an AttentionBias or None, got {type(attn_bias).__name__}")
    rule = attn_bias if isinstance(attn_bias, AttentionBias) else AttentionBias()
    options = FlashOptions(p, rule.is_causal, scale, rule.alignment, rule.window)
    mask = attn_bias if isinstance(attn_bias, Tensor) else rule.bias
    if mask is not None and mask.dim() == query.dim() == 5:
        out = _by_group(query, key, value, mask, options)
    elif isinstance(rule, BlockDiagonalMask):
        out = _within_blocks(*_with_heads(query, key, value), rule, options)
    else:
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == query.dim() == 3 else mask
        out, _ = attend(*_with_heads(query, key, value), options, mask=mask)
    return out.reshape(*query.shape[:-1], value.shape[-1]).contiguous()


def _with_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, M, Hq, K]`` and ``[B, Mkv, Hkv, K]``, where Hkv is G if keys and values are expanded over H."""
    if query.dim() == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if query.dim() == 4:
        return query, key, value
    if key.stride(3) == value.stride(3) == 0:
        return query.flatten(2, 3), key.select(3, 0), value.select(3, 0)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: FlashOptions) -> Tensor:
    """``[B, M, G, H, K]`` -> ``[B, M, G, H, Kv]`` under a mask that broadcasts to ``[B, G, H, M, Mkv]``. G is a leading
    dimension, so that a mask that is expanded over G or H is not copied."""
    q, k, v = (t.permute(0, 2, 3, 1, 4) for t in (query, key, value))
    if key.stride(3) == value.stride(3) == 0:
        k, v = k[:, :, :1], v[:, :, :1]
    out = sdpa(q, k, v, mask, **options.rules(), config=options.config)
    return out.permute(0, 3, 1, 2, 4)


def _within_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: FlashOptions) -> Tensor:
    """``[1, M, Hq, K]``, ``[1, Mkv, Hkv, K]`` -> ``[M, Hq, Kv]``, each block by itself."""
    check_layout((1, mask.q_seqinfo.seqstart_py[-1], "heads", "head_dim"), query=q)
    check_layout((1, mask.k_seqinfo.seqstart_py[-1], "heads", "head_dim"), key=k)
    q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)  # not [0], whose gradient is a copy
    q_ends, k_ends = torch.tensor(mask.q_seqinfo.seqstart_py), torch.tensor(mask.k_seqinfo.seqstart_py)
    return varlen_attend(q, k, v, q_ends, k_ends, options, with_lse=False)[0]


class AnyOp:
    """Stands for each of xformers' operators, which programs pass as ``op``."""

    NAME = "pascal_attn"
    SUPPORTED_DTYPES = FLOATS

    @classmethod
    def supports(cls, inputs: Any) -> bool:
        return True


ANY_OPS = (AnyOp, AnyOp)  # of the forward and the backward pass


class SwiGLU(nn.Module):
    """``w3(silu(w1(x)) * w2(x))``; the weights of w1 and w2 are those of one layer ``w12`` unless ``_pack_weights`` is
    False."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ):
        super().__init__()
        hidden_features = hidden_features or in_features
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        else:
            self.w1, self.w2 = (nn.Linear(in_features, hidden_features, bias=bias) for _ in range(2))
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)
        self.packed = _pack_weights

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1) if self.packed else (self.w1(x), self.w2(x))
        return self.w3(F.silu(gate) * up)


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, of size ``dim``."""

    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6):
        super().__init__(dim, eps, include_weight)


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: Any = None,
) -> Tensor:
    """``(silu(x w1 + b1) * (x w2 + b2)) w3 + b3``: x ``[..., features]``, weights ``[out, in]``; ``op`` is ignored."""
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


def patch_xformers(*, replace: bool | None = None, around: Around | None = None) -> Patch:
    """Make ``import xformers`` find our functions: ``ops.memory_efficient_attention``, ``ops.fmha.attn_bias``, and in
    plain PyTorch ``ops.{unbind,SwiGLU,RMSNorm}``.

    Code that imported the name earlier, or found it missing, keeps what it found: call this first; diffusers asks when
    it is imported. Package metadata agrees (``importlib.metadata.version("xformers")`` is ``"0.0.35+pascal..."``).

    Args:
        replace: whether ours take the place of a real package that is installed; None = of one that cannot run on this
            machine's devices, which the log names.
        around: see :func:`pascal_attn_core.patch_flash_attn`.
    Returns:
        A Patch; ``.remove()`` restores what was there before.
    Raises:
        RuntimeError: a real package is installed and stays.
    """
    package, counted = __name__.rpartition(".")[0], ("memory_efficient_attention",)
    given: dict[str, Any] = {"package": package, "eager": tuple(_MODULES), "around": around, "counted": counted}
    return _installer.install(lambda: StandIn(_PROVIDED, _MODULES, **given), replace=replace)


install_as_xformers = patch_xformers
