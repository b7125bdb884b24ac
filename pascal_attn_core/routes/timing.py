"""Our kernel and torch's timed against each other on the user's own card, once per kind of call.

Which of two exact kernels is the faster one on an old card, with the torch and the driver that are installed there,
cannot be known beforehand: a small call of the same kind is run by both. The result is stored on disk, so that the same
machine decides the same way every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, check_call
from ..config import AttentionConfig, RouteUnavailable
from ..contest.timing_table import Attempt, CallKind, Contest, kind_text, power_of_two
from ..fused.code.source import kernels_digest
from ..fused.launch.plan import variant_of
from ..fused.trust.kernels import Kernels
from ..machine.out_of_memory import is_out_of_memory
from ..machine.own_thread import in_backward
from ..patching.interception import torch_sdpa
from .flash_attn_triton import conditions
from .route import Request, Route
from .torch_faults import TORCHS
from .torch_kernel import TorchForm, find_form, run_form

# The timed call is no larger than this: beyond, the time per score no longer depends on the length.
_TOKENS = 1024
_KEYS_OF_FEW_QUERIES = 16384
_ROWS = 1 << 16  # query rows of all heads together, several times what the largest card works on at once
_ROWS_WITH_GRADIENTS = 1 << 14  # there each head has memory of its own
_PLAIN_BYTES = 64 << 20  # of the float32 scores of a call that torch stores them for
_CONFIG = AttentionConfig()
Maker = Callable[[AttentionCall], Attempt | None]  # of an attempt at a sample, None where it cannot be made


def kind_of(call: AttentionCall, against: str = "torch") -> CallKind:
    """The kind of a call that the fused kernel takes."""
    mask = call.attn_mask
    q_tokens = min(_TOKENS, power_of_two(call.seq_len_q))
    most_keys = min(_KEYS_OF_FEW_QUERIES, _TOKENS * _TOKENS // q_tokens)
    most_rows = _ROWS_WITH_GRADIENTS if call.needs_grad else _ROWS
    return CallKind(
        kernel=variant_of(call, "forward").name,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        q_tokens=q_tokens,
        kv_tokens=min(most_keys, power_of_two(call.seq_len_kv)),
        groups=call.groups,
        rows=min(most_rows, power_of_two(call.batch_size * call.num_heads * call.seq_len_q)),
        mask="" if mask is None else "keys" if mask.dim() < 2 or mask.shape[-2] == 1 else "queries",
        is_causal=call.is_causal,
        gradients=call.needs_grad,
        against=against,
    )


class Times(NamedTuple):
    """Times of torch's kernel and of ours on plain cores, divided by the time of ours on tensor cores, for one kind of
    call. None where a kernel takes no such call."""

    torch: float | None
    plain: float | None

    def are_longer(self, *, with_torch: bool = True, with_plain: bool = True) -> bool:
        """Whether the kernel on tensor cores is the fastest of those that take the call; ``with_torch``: torch's kernel
        does, ``with_plain``: ours on plain cores does."""
        others = (self.torch if with_torch else None, self.plain if with_plain else None)
        return all(other is None or other > 1.0 for other in others)

    @property
    def over_torch(self) -> float | None:
        return 1 / self.torch if self.torch else None

    def words(self, kernel: str = TORCHS) -> str:
        """``kernel``: the one that takes such calls in place of torch's."""
        known = {kernel: self.torch, "ours on plain cores": self.plain}
        return " and ".join(f"{1 / time:.2f} of the time of {name}" for name, time in known.items() if time)


class Timings(Contest[CallKind]):
    """Our kernels timed against each other and against torch's. Made by ``runtime.part(Timings)``.

    Everything is timed at the first call of a kind, which takes some milliseconds, and never again on this machine with
    the same card, torch and kernels. In a backward pass the timing waits for the next call outside of it. All answers
    may be None (:meth:`..contest.timing_table.Contest.find`), since torch may refuse the timed call.
    """

    kind_type = CallKind

    def fused_over_torch(self, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        """Our time divided by torch's for this kind of call. Both routes must take it; torch may need a rewrite that
        fits the budget."""
        makers = {"fused": lambda sample: _by(ours, sample), "torch": lambda sample: _by_torch(sample, budget_bytes)}
        return _ratio(self._times(kind_of(call), call, makers))

    def fused_over_plain(self, ours: Route, call: AttentionCall) -> float | None:
        """As :meth:`fused_over_torch`, for calls that torch has no fused kernel for, and stores all scores of. The
        timed call has no more scores than fit _PLAIN_BYTES."""
        kind = kind_of(call, "plain" if ours.name == "fused" else f"plain, {ours.name}")
        kind = kind._replace(rows=min(kind.rows, max(kind.q_tokens * kind.groups, _PLAIN_BYTES // 4 // kind.kv_tokens)))
        return _ratio(self._times(kind, call, {"fused": lambda sample: _by(ours, sample), "torch": _plainly}))

    def tiled_over_torch(self, tiles: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        """Return the time of tiles of plain PyTorch divided by that of torch's kernel, which takes calls of this kind
        only rewritten."""
        makers = {"tiled": lambda sample: _by(tiles, sample), "torch": lambda sample: _by_torch(sample, budget_bytes)}
        found = self._times(kind_of(call, "tiled"), call, makers)
        return found["tiled"] / found["torch"] if found and len(found) == 2 else None

    def over_tensor(self, ours: Route, plain: Route, call: AttentionCall, budget_bytes: int) -> Times | None:
        """Return the other kernels' times divided by that of ``ours``, the route on tensor cores, from one timing of
        all."""
        makers = {"tensor": lambda sample: _by(ours, sample), "plain": lambda sample: _by(plain, sample)}
        makers["torch"] = lambda sample: _by_torch(sample, budget_bytes)
        found = self._times(kind_of(call, "tensor"), call, makers)
        if found is None or "tensor" not in found:
            return None
        return Times(*(found[name] / found["tensor"] if name in found else None for name in Times._fields))

    def ratios(self, against: str) -> dict[str, float]:
        """The known answers of :meth:`fused_over_torch`, or ``"plain"``, by the kind in words."""
        found = {kind_text(kind): _ratio(times) for kind, times in self.known.items() if kind.against == against}
        return {words: ratio for words, ratio in found.items() if ratio is not None}

    def _times(self, kind: CallKind, call: AttentionCall, makers: dict[str, Maker]) -> dict[str, float] | None:
        """Milliseconds of the attempts that can be made at a sample of this kind; None as in :meth:`.Contest.find`."""
        if kind not in self.known and in_backward():  # it is kept until the pass is over, without its values
            mask = call.attn_mask
            query, key, value = (t.new_empty(0) for t in (call.query, call.key, call.value))
            call = call.with_tensors(query, key, value, mask.new_empty(0) if isinstance(mask, Tensor) else mask)

        def measure() -> dict[str, float] | None:
            with torch.set_grad_enabled(kind.gradients):
                sample = sample_call(call, kind)
                made = {name: make(sample) for name, make in makers.items()}
                return self.timed(kind, {name: attempt for name, attempt in made.items() if attempt is not None})

        return self.find(kind, measure, may_wait=True)

    def conditions(self) -> dict[str, str]:
        arch = self.runtime.part(Kernels).variant_arch
        digest = kernels_digest(arch)
        card = {"card": self.info.name, "arch": arch or self.info.arch}
        return {**card, "torch": torch.__version__, "kernels": digest, **conditions()}


def _ratio(times: dict[str, float] | None) -> float | None:
    return times["fused"] / times["torch"] if times and len(times) == 2 else None


def _plainly(sample: AttentionCall) -> Attempt:
    """A sample by torch's function, with a key head for each query head, as every version of it takes them."""

    def attempt() -> Tensor:
        key, value = (t.repeat_interleave(sample.groups, dim=-3) for t in (sample.key, sample.value))
        is_causal = sample.is_causal and sample.attn_mask is None  # torch takes one of the two
        try:
            return torch_sdpa(sample.query, key, value, sample.attn_mask, 0.0, is_causal, scale=sample.scale)
        except RuntimeError as error:  # without it there is no answer
            raise error if is_out_of_memory(error) else RouteUnavailable(f"torch's math fails: {error}") from error

    return _with_gradients(sample, attempt)


def _by(route: Route, sample: AttentionCall) -> Attempt | None:
    plan = route.plan(Request(sample, _CONFIG))
    if isinstance(plan, list):
        return None

    def attempt() -> Tensor:
        if sample.needs_grad:
            return route.with_gradients(sample, _CONFIG, plan)[0]
        return route.forward(sample, _CONFIG, plan, with_lse=False, for_grad=False, stats=None).out

    return _with_gradients(sample, attempt)


def _by_torch(sample: AttentionCall, budget_bytes: int) -> Attempt | None:
    """A sample by torch's kernel, or None where it does not take it."""
    form = find_form(sample, budget_bytes)
    return _with_gradients(sample, lambda: run_form(sample, form)) if isinstance(form, TorchForm) else None


def sample_call(call: AttentionCall, kind: CallKind) -> AttentionCall:
    """A call of this kind on the same device: random numbers, and as many heads as make the kind's rows. Without
    gradients all heads share the memory of one."""
    kv_heads, device = max(1, kind.rows // (kind.q_tokens * kind.groups)), call.query.device
    generator = torch.Generator(device).manual_seed(0)

    def numbers(heads: int, tokens: int, head_dim: int) -> Tensor:
        shape = (1, heads if kind.gradients else 1, tokens, head_dim)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(call.query.dtype).expand(1, heads, -1, -1).requires_grad_(kind.gradients)

    mask = None
    if call.attn_mask is not None:
        rows = kind.q_tokens if kind.mask == "queries" else 1
        mask = torch.zeros((1, 1, rows, kind.kv_tokens), dtype=call.attn_mask.dtype, device=device)
        mask = ~mask if mask.dtype == torch.bool else mask
    query = numbers(kv_heads * kind.groups, kind.q_tokens, call.head_dim)
    key, value = (numbers(kv_heads, kind.kv_tokens, dim) for dim in (call.head_dim, call.head_dim_v))
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": kind.groups > 1}
    return check_call(query, key, value, mask, **options)


def _with_gradients(call: AttentionCall, forward: Callable[[], Tensor]) -> Callable[[], Any]:
    if not call.needs_grad:
        return forward

    def both() -> Any:
        out = forward()
        return torch.autograd.grad(out, (call.query, call.key, call.value), out.detach())

    return both
