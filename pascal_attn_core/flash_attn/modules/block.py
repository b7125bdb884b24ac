"""Transformer blocks: ``flash_attn.modules.block``."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..options import FlashArgumentError
from ..signatures import called_as
from .mha import MHA
from .mlp import Mlp


class StochasticDepth(nn.Dropout):
    """In training, with probability p a whole sample (dimension 0) becomes 0, and the others are divided by 1 - p."""

    def forward(self, input: Tensor) -> Tensor:
        """A tensor of the shape of input."""
        if not self.training or not self.p:
            return input
        return input * super().forward(input.new_ones(input.shape[0], *[1] * (input.dim() - 1)))


class Block(nn.Module):
    """A block of attention (mixer) and MLP.

    With ``prenorm`` it is dropout, sum, norm, mixer, dropout, sum, norm, MLP, and takes and returns the residual beside
    the hidden states; without, mixer, dropout, sum, norm, MLP, dropout, sum, norm.

    Args:
        mixer_cls, mlp_cls: called with dim; None = MHA with heads of 64 numbers, Mlp with 4 * dim.
        norm_cls, dropout_cls: called with dim and with a probability; None = LayerNorm, Dropout.
        drop_path1, drop_path2: probability that a sample skips the mixer, the MLP.
        fused_dropout_add_ln: ignored, for compatibility; the result is the same.
        sequence_parallel, mark_shared_params: ignored, for compatibility: they concern models that are split.
        return_residual: mixer and mlp return (output, input); only without prenorm.
        residual_in_fp32: only with prenorm.
    """

    @called_as(
        "self dim mixer_cls=None mlp_cls=None norm_cls=None dropout_cls=None prenorm=True resid_dropout1=0.0 "
        "resid_dropout2=0.0 drop_path1=0.0 drop_path2=0.0 fused_dropout_add_ln=False return_residual=False "
        "residual_in_fp32=False sequence_parallel=False mark_shared_params=False",
        ignored="sequence_parallel mark_shared_params",
    )
    def __init__(self, dim: int, mixer_cls: Any, mlp_cls: Any, norm_cls: Any, dropout_cls: Any, **given: Any) -> None:
        super().__init__()
        if given["residual_in_fp32"] and not given["prenorm"]:
            raise FlashArgumentError("residual_in_fp32 needs prenorm=True")
        for name in ("prenorm", "fused_dropout_add_ln", "return_residual", "residual_in_fp32"):
            setattr(self, name, given[name])
        norm_cls, dropout_cls = norm_cls or nn.LayerNorm, dropout_cls or nn.Dropout
        self.mixer = (mixer_cls or partial(MHA, num_heads=dim // 64))(dim)
        self.dropout1, self.drop_path1 = dropout_cls(given["resid_dropout1"]), StochasticDepth(given["drop_path1"])
        self.norm1 = norm_cls(dim)
        self.mlp = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2, self.drop_path2 = dropout_cls(given["resid_dropout2"]), StochasticDepth(given["drop_path2"])
            self.norm2 = norm_cls(dim)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """hidden_states ``[B, L, dim]``: with prenorm (that, residual), else that."""
        kwargs = dict(mixer_kwargs or {})
        if not self.prenorm:
            if residual is not None:
                raise FlashArgumentError("residual must be None without prenorm")
            return self._postnorm(hidden_states, kwargs)
        hidden_states, residual = self._added(1, hidden_states, residual)
        if mixer_subset is not None:
            kwargs["mixer_subset"] = mixer_subset
        hidden_states = self.mixer(hidden_states, **kwargs)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if not isinstance(self.mlp, nn.Identity):
            hidden_states, residual = self._added(2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _postnorm(self, hidden_states: Tensor, mixer_kwargs: dict[str, Any]) -> Tensor:
        for number, part, kwargs in ((1, self.mixer, mixer_kwargs), (2, self.mlp, {})):
            if part is self.mlp and isinstance(part, nn.Identity):
                break
            out = part(hidden_states, **kwargs)
            if self.return_residual:
                out, hidden_states = out
            hidden_states, _ = self._added(number, out, hidden_states)
        return hidden_states

    def _added(self, number: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Any]:
        """(norm of dropout(x) + residual, that sum)."""
        norm, dropout, drop_path = (getattr(self, f"{name}{number}") for name in ("norm", "dropout", "drop_path"))
        x = drop_path(dropout(x))
        total = x if residual is None else x + residual
        return norm(total.to(norm.weight.dtype)), total.float() if self.residual_in_fp32 else total

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        """The cache of the mixer."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
