"""Makes ``import flash_attn`` find our functions."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

from ..patching.patch import Patch
from ..patching.stand_in import Around, Installer, StandIn, refuse_real_package

_ROOT = "flash_attn"
_PROVIDED = f"{_ROOT}==2.8.4"
_FA3 = "flash_attn_interface"
_TURING = "flash_attn_turing"
_ROTARY = "rotary_emb"  # flash-attn's extension for rotary embeddings, which programs of its first versions import
_INTERFACE_MODULE = "flash_attn.flash_attn_interface"
# What ``around`` is put around.
_COUNTED = ("flash_attn_", "_flash_attn_", "_wrapped_flash_attn_", "fwd", "bwd", "varlen_fwd", "varlen_bwd")

# See StandIn: "." is this folder.
_INTERFACE = (
    ".: flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
    "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func"
)
_CACHE = ".modules.absent: flash_attn_with_kvcache"
# Without autograd.
_RAW_NAMES = ("flash_attn_forward", "flash_attn_backward", "flash_attn_varlen_forward", "flash_attn_varlen_backward")
_RAW = ".modules.raw: " + " ".join(f"{prefix}{name}={name}" for prefix in ("_", "_wrapped_") for name in _RAW_NAMES)
# Programs import these from flash-attn's modules, which have them from einops.
_EINOPS = "einops: rearrange repeat"
_FOLDERS = ("layers", "losses", "modules", "ops", "ops.triton", "utils")
_MODULES: dict[str, tuple[str, ...]] = {
    **{f"flash_attn.{name}": () for name in _FOLDERS},
    "flash_attn": (_INTERFACE, _CACHE),
    _INTERFACE_MODULE: (
        _INTERFACE,
        _CACHE,
        _RAW,
    ),
    "flash_attn.bert_padding": (
        ".modules.padding: index_first_axis index_put_first_axis pad_input unpad_input",
        ".modules.absent: index_first_axis_residual unpad_input_for_concatenated_sequences",
        _EINOPS,
    ),
    "flash_attn.layers.patch_embed": (".modules.absent: PatchEmbed",),
    "flash_attn.layers.rotary": (
        ".modules.rotary: ApplyRotaryEmb RotaryEmbedding apply_rotary apply_rotary_emb apply_rotary_emb_func "
        "apply_rotary_emb_kv_ apply_rotary_emb_qkv_",
        ".modules.absent: apply_rotary_emb_torch rotate_half",
        _EINOPS,
    ),
    "flash_attn.losses.cross_entropy": (".modules.absent: CrossEntropyLoss cross_entropy_loss",),
    "flash_attn.modules.block": (".modules.absent: Block ParallelBlock StochasticDepth",),
    "flash_attn.modules.embedding": (
        ".modules.absent: BertEmbeddings ColumnParallelEmbedding GPT2Embeddings ParallelGPT2Embeddings "
        "VocabParallelEmbedding",
    ),
    "flash_attn.modules.mha": (
        ".modules.mha: MHA",
        ".modules.rotary: RotaryEmbedding",
        ".modules.mlp: FusedDense",
        ".modules.absent: ColumnParallelLinear CrossAttention FlashCrossAttention FlashSelfAttention LinearResidual "
        "ParallelMHA RowParallelLinear SelfAttention _update_kv_cache get_alibi_slopes",
        _INTERFACE,
        _EINOPS,
    ),
    "flash_attn.modules.mlp": (
        ".modules.mlp: FusedMLP",
        ".modules.absent: GatedMlp Mlp ParallelFusedMLP ParallelGatedMlp ParallelMLP",
    ),
    "flash_attn.ops.activations": (
        ".modules.mlp: swiglu",
        ".modules.absent: SwiGLUFunction bias_gelu bias_gelu_back bias_gelu_impl fast_gelu_impl gelu_bwd gelu_fwd "
        "relu_bwd sqrelu_bwd sqrelu_fwd swiglu_bwd swiglu_fwd",
    ),
    "flash_attn.ops.fused_dense": (
        ".modules.mlp: FusedDense FusedMLP fused_dense_func fused_mlp_func",
        ".modules.absent: ColumnParallelLinear ParallelFusedMLP RowParallelLinear",
    ),
    "flash_attn.ops.layer_norm": (
        ".modules.norms: dropout_add_layer_norm",
        ".modules.absent: DropoutAddLayerNorm dropout_add_layer_norm_parallel_residual dropout_add_layer_norm_subset "
        "layer_norm",
    ),
    "flash_attn.ops.rms_norm": (
        ".modules.norms: DropoutAddRMSNorm RMSNorm=OlderRMSNorm dropout_add_rms_norm rms_norm",
        ".modules.absent: dropout_add_rms_norm_parallel_residual dropout_add_rms_norm_subset",
    ),
    "flash_attn.ops.triton.cross_entropy": (".modules.absent: cross_entropy_loss",),
    "flash_attn.ops.triton.layer_norm": (
        ".modules.norms: RMSNorm layer_norm_fn rms_norm_fn",
        ".modules.absent: layer_norm_linear_fn layer_norm_ref rms_norm_ref",
    ),
    "flash_attn.ops.triton.rotary": (".modules.rotary: apply_rotary",),
    "flash_attn.utils.distributed": (
        ".modules.absent: all_gather all_gather_raw all_reduce all_reduce_raw allreduce_sequence_parallel_grad "
        "get_dim_for_local_rank reduce_scatter reduce_scatter_raw sync_shared_params",
    ),
    "flash_attn.utils.generation": (
        ".modules.absent: GenerationMixin InferenceParams allocate_inference_cache decode "
        "modify_logits_for_top_k_filtering modify_logits_for_top_p_filtering sample",
    ),
    _TURING: (".: flash_attn_varlen_func", ".modules.turing: bwd flash_attn_func fwd varlen_bwd varlen_fwd"),
    _ROTARY: (".modules.rotary: apply_rotary=rotary_emb",),
    _FA3: (
        ".modules.version3: flash_attn_func flash_attn_qkvpacked_func flash_attn_varlen_func "
        "_flash_attn_backward=flash_attn_backward _flash_attn_forward=flash_attn_forward",
        ".modules.absent: flash_attn_combine flash_attn_with_kvcache get_scheduler_metadata",
    ),
}
_EAGER = ("flash_attn", _INTERFACE_MODULE, "flash_attn.bert_padding")
_installer = Installer(_ROOT, "fa3")


def patch_flash_attn(
    *, replace: bool | None = None, fa3: str | None = "out_and_lse", around: Around | None = None
) -> Patch:
    """Make ``import flash_attn``, and what programs import from it, find our functions.

    docs/programs.md says what there is besides attention: rotary embeddings, norms, layers, the functions without
    autograd, the module ``flash_attn_interface`` of FlashAttention-3, and ``flash_attn_turing``
    (unless the real one is installed). Each is loaded when it is imported.

    Code that imported the name earlier, or found it missing, keeps what it found: call this first. Package metadata
    agrees (``importlib.metadata.version("flash_attn")`` is ``"2.8.4+pascal..."``), since that is what Transformers
    checks: with a CUDA device its ``is_flash_attn_2_available()`` is then True, and
    ``attn_implementation="flash_attention_2"`` runs on ours; without CUDA it stays False, as with the real package.
    Diffusers offers its backend ``flash`` on any device then.

    Args:
        replace: whether ours take the place of a real package that is installed; None = of one that cannot run on this
            machine's devices, which the log names.
        fa3: what the functions of ``flash_attn_interface`` return where ``return_attn_probs`` is not given.
            "out_and_lse": (out, lse), as FlashAttention-3 did before it had that argument; Wan's own programs rely on
            it, Transformers and diffusers accept it. "out": as FlashAttention-3 does today. None: there is no such
            module, and programs that look for it first go on to ``flash_attn``.
        around: ``around(name, function)`` gives what programs find for each attention function, called ``name`` in its
            module: for example to count the calls. If there are several installations, that of the first is used.
    Returns:
        A Patch; ``.remove()`` removes our modules and restores what was there before.
    Raises:
        ValueError: fa3 is something else, or another one than that of an installation in force.
        RuntimeError: a real package is installed and stays.
    """
    if fa3 not in ("out", "out_and_lse", None):
        raise ValueError(f"fa3 must be 'out', 'out_and_lse' or None, got {fa3!r}")
    return _installer.install(lambda: _stand_in(fa3, replace, around), fa3, replace=replace)


install_as_flash_attn = patch_flash_attn


def _stand_in(fa3: str | None, replace: bool | None, around: Around | None) -> StandIn:
    if fa3:
        refuse_real_package(_FA3, replace, ", or fa3=None to leave it alone")
    without = set() if replace else {name for name in (_TURING, _ROTARY) if find_spec(name) is not None}
    if not fa3:
        without.add(_FA3)

    def adapt(name: str, members: dict[str, Any]) -> None:
        if name == _FA3 and fa3 == "out_and_lse":
            for member in ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"):
                members[member] = functools.partial(members[member], return_attn_probs=True)

    return StandIn(
        _PROVIDED,
        {name: sources for name, sources in _MODULES.items() if name not in without},
        package=__name__.rpartition(".")[0],
        eager=_EAGER,
        adapt=adapt,
        around=around,
        counted=_COUNTED,
    )
