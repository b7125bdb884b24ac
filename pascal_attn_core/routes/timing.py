"""Our kernel and torch's timed against each other on the user's own card, once per kind of call.

Which of two exact kernels is the faster one on an old card, with the torch and the driver that are installed there,
cannot be known beforehand: a small call of the same kind is run by both. The result is stored on disk, so that the same
machine decides the same way every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, check_call
from ..config import AttentionConfig
from ..fused.kernels import Kernels
from ..fused.plan import variants_of
from ..fused.source import kernels_digest
from ..interception import torch_sdpa
from ..lazy_mask import LazyMask
from ..own_thread import in_backward
from .route import Request, Route
from .timing_table import TimingTable, log, power_of_two
from .torch_kernel import TorchForm, find_form, run_form

# The timed call is no larger than this: beyond, the time per score no longer depends on the length.
_TOKENS = 1024
_KEYS_OF_FEW_QUERIES = 16384
_ROWS = 1 << 16  # query rows of all heads together, several times what the largest card works on at once
_ROWS_WITH_GRADIENTS = 1 << 14  # there each head has memory of its own
_PLAIN_BYTES = 64 << 20  # of the float32 scores of a call that torch stores them for
_CONFIG = AttentionConfig()


class Kind(NamedTuple):
    """Calls that are taken to be alike. Token and row counts are powers of two, at most those of the timed call.

    Attributes:
        variant: of the fused kernel: head_dim, dtype, kind of mask.
        head_dim, head_dim_v: of the call.
        q_tokens, kv_tokens: of a sequence.
        groups: query heads per key/value head.
        rows: query rows of all heads and batches together.
        mask_rows: 0 no mask, 1 one row for all queries, 2 a row for each.
        is_causal, gradients: whether the call is causal, and has gradients.
    """

    variant: str
    head_dim: int
    head_dim_v: int
    q_tokens: int
    kv_tokens: int
    groups: int
    rows: int
    mask_rows: int
    is_causal: bool
    gradients: bool

    def __str__(self) -> str:
        masks = ("", ", one mask row", ", a mask row per query")[self.mask_rows]
        words = ", causal" * self.is_causal + ", gradients" * self.gradients
        groups = f", groups of {self.groups}" if self.groups > 1 else ""
        return f"{self.variant}: {self.q_tokens} x {self.kv_tokens} tokens, {self.rows} rows{groups}{masks}{words}"

    @staticmethod
    def of(call: AttentionCall) -> Kind:
        """The kind of a call that the fused kernel takes."""
        mask = call.attn_mask
        q_tokens = min(_TOKENS, power_of_two(call.seq_len_q))
        most_keys = min(_KEYS_OF_FEW_QUERIES, _TOKENS * _TOKENS // q_tokens)
        most_rows = _ROWS_WITH_GRADIENTS if call.needs_grad else _ROWS
        return Kind(
            variants_of(call).forward.name,
            call.head_dim,
            call.head_dim_v,
            q_tokens,
            min(most_keys, power_of_two(call.seq_len_kv)),
            call.groups,
            min(most_rows, power_of_two(call.batch_size * call.num_heads * call.seq_len_q)),
            0 if mask is None else 1 if mask.dim() < 2 or mask.shape[-2] == 1 else 2,
            call.is_causal,
            call.needs_grad,
        )


class _Ratios(TimingTable[Kind, float]):
    """What our kernel takes in units of another's time, for each kind of call."""

    def conditions(self) -> dict[str, str]:
        info = self.info
        arch = self.runtime.part(Kernels).variant_arch
        kernels = kernels_digest(arch)
        return {"card": info.name, "arch": arch or info.arch, "torch": torch.__version__, "kernels": kernels}

    def kind_of(self, fields: Mapping[str, Any]) -> Kind:
        return Kind(**fields)

    def row(self, found: float) -> dict[str, Any]:
        return {"ratio": round(found, 4)}

    def found_in(self, row: Mapping[str, Any]) -> float:
        return float(row["ratio"])


class Timings(_Ratios):
    """Our kernel's time in units of torch's for each kind of call. Made by ``runtime.part(Timings)``."""

    section = "fused_over_torch"

    def fused_over_torch(self, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        """How long our kernel takes, in units of torch's time, for calls of this kind on this device.

        Both are timed at the first such call, which takes some milliseconds, and never again on this machine with the
        same card, torch and kernels; in a backward pass not before the next call outside of it.

        Args:
            ours: the fused route.
            call: one that the fused route takes, and torch's kernel as it is or rewritten.
            budget_bytes: extra memory that torch's route may use.
        Returns:
            The ratio, or None: see :meth:`.timing_table.TimingTable.find`. Torch may refuse the timed call.
        """
        kind = Kind.of(call)
        if kind not in self.known and in_backward():
            call = _without_numbers(call)  # kept until the pass is over
        return self.find(kind, lambda: self._timed(kind, ours, call, budget_bytes), may_wait=True)

    def _timed(self, kind: Kind, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        device = call.query.device
        with torch.set_grad_enabled(kind.gradients):
            sample = sample_call(call, kind)
            form, ours_on_it = find_form(sample, budget_bytes), _by(ours, sample)
            if not isinstance(form, TorchForm) or ours_on_it is None:
                return None
            attempts: list[Callable[[], Tensor]] = [ours_on_it, lambda: run_form(sample, form)]
            our_time, its_time = self.clock([_with_gradients(sample, attempt) for attempt in attempts], device)
        log.info("timed once on %s: fused %.2f ms, torch %.2f ms for %s", device, our_time, its_time, kind)
        return our_time / its_time


class PlainTimings(_Ratios):
    """Our kernel's time in units of that of torch's function where torch has no fused kernel, and stores all scores,
    for each kind of call. Made by ``runtime.part(PlainTimings)``."""

    section = "fused_over_plain"
    file_kind = "timings-plain"

    def fused_over_plain(self, ours: Route, call: AttentionCall) -> float | None:
        """As :meth:`Timings.fused_over_torch`, for calls that torch has no fused kernel for. The timed call has no more
        scores than fit _PLAIN_BYTES."""
        kind = Kind.of(call)
        kind = kind._replace(rows=min(kind.rows, max(kind.q_tokens * kind.groups, _PLAIN_BYTES // 4 // kind.kv_tokens)))
        if kind not in self.known and in_backward():
            call = _without_numbers(call)
        return self.find(kind, lambda: self._timed(kind, ours, call), may_wait=True)

    def _timed(self, kind: Kind, ours: Route, call: AttentionCall) -> float | None:
        with torch.set_grad_enabled(kind.gradients):
            sample = sample_call(call, kind)
            ours_on_it = _by(ours, sample)
            if ours_on_it is None:
                return None
            plain = _torchs(_with_gradients(sample, lambda: _plainly(sample)))
            try:
                our_time, its_time = self.clock([_with_gradients(sample, ours_on_it), plain], call.query.device)
            except _TorchFailed as failure:
                log.info("torch's math fails on %s for %s: %s", self.device, kind, failure.__cause__)
                return None
        log.info("timed once on %s: fused %.2f ms, torch's math %.2f ms for %s", self.device, our_time, its_time, kind)
        return our_time / its_time


class _TorchFailed(Exception):
    """torch could not compute a call that was to be timed; its error is the cause."""


def _torchs(attempt: Callable[[], Any]) -> Callable[[], Any]:
    """An attempt of torch's, whose errors are not ours; a lack of memory is what it was."""

    def run() -> Any:
        try:
            return attempt()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _TorchFailed from error

    return run


def _plainly(sample: AttentionCall) -> Tensor:
    """A sample by torch's function, with a key head for each query head, as every version of it takes them."""
    assert not isinstance(sample.attn_mask, LazyMask)
    key, value = (t.repeat_interleave(sample.groups, dim=-3) for t in (sample.key, sample.value))
    is_causal = sample.is_causal and sample.attn_mask is None  # torch takes one of the two
    return torch_sdpa(sample.query, key, value, sample.attn_mask, 0.0, is_causal, scale=sample.scale)


class Times(NamedTuple):
    """Of one kind of call, in units of the time of our kernel on tensor cores.

    Attributes:
        torch: of torch's kernel; None where it takes no such call.
        plain: of our kernel on plain cores; None where it takes none.
        barrier: of the one on tensor cores whose warps meet at a barrier where they wait for counters otherwise; None
            where there is none.
    """

    torch: float | None
    plain: float | None
    barrier: float | None = None

    @property
    def best(self) -> float:
        """Of the two kernels on tensor cores."""
        return min(1.0, self.barrier or 1.0)

    def are_longer(self, *, with_torch: bool = True, with_plain: bool = True) -> bool:
        """Whether a kernel on tensor cores is the fastest of those that take the call; ``with_torch``: torch's kernel
        does, ``with_plain``: ours on plain cores does."""
        others = (self.torch if with_torch else None, self.plain if with_plain else None)
        return all(other is None or other > self.best for other in others)

    @property
    def over_torch(self) -> float | None:
        return self.best / self.torch if self.torch else None

    def words(self) -> str:
        known = {"torch's kernel": self.torch, "ours on plain cores": self.plain}
        return " and ".join(f"{self.best / time:.2f} of the time of {name}" for name, time in known.items() if time)


class TensorTimings(TimingTable[Kind, Times]):
    """What our kernel on tensor cores is compared with, for each kind of call. Made by
    ``runtime.part(TensorTimings)``."""

    section = "over_tensor"
    file_kind = "timings-tensor"

    def of(
        self,
        ours: Route,
        plain: Route,
        call: AttentionCall,
        budget_bytes: int,
        other_plan: Callable[[AttentionCall, Any], Any],
    ) -> Times | None:
        """The times for calls of this kind on this device: as :meth:`Timings.fused_over_torch`, from one timing.

        Args:
            ours: the route on tensor cores, which takes the call; plain: the one on plain cores.
            other_plan: call and plan of ours -> the same with a barrier, or None.
        """
        kind = Kind.of(call)
        if kind not in self.known and in_backward():
            call = _without_numbers(call)
        return self.find(kind, lambda: self._timed(kind, ours, plain, call, budget_bytes, other_plan), may_wait=True)

    def _timed(
        self,
        kind: Kind,
        ours: Route,
        plain: Route,
        call: AttentionCall,
        budget_bytes: int,
        other_plan: Callable[[AttentionCall, Any], Any],
    ) -> Times | None:
        device = call.query.device
        with torch.set_grad_enabled(kind.gradients):
            sample = sample_call(call, kind)
            plan, form = ours.plan(Request(sample, _CONFIG)), find_form(sample, budget_bytes)
            if isinstance(plan, list):
                return None
            other = other_plan(sample, plan)
            attempts = [
                _by(ours, sample),
                _by(plain, sample),
                (lambda: run_form(sample, form)) if isinstance(form, TorchForm) else None,
                None if other is None else _by(ours, sample, other),
            ]
            there = [attempt for attempt in attempts if attempt is not None]
            times = iter(self.clock([_with_gradients(sample, attempt) for attempt in there], device))
            own, on_plain, by_torch, barrier = (None if attempt is None else next(times) for attempt in attempts)
        assert own is not None
        log.info("timed once on %s: on tensor cores %.2f ms (with a barrier %s ms), plain %s ms, torch %s ms for %s",
                 device, own, barrier, on_plain, by_torch, kind)  # fmt: skip
        return Times(*(None if time is None else time / own for time in (by_torch, on_plain, barrier)))

    def conditions(self) -> dict[str, str]:
        info = self.info
        return {"card": info.name, "arch": info.arch, "torch": torch.__version__, "kernels": kernels_digest()}

    def kind_of(self, fields: Mapping[str, Any]) -> Kind:
        return Kind(**fields)

    def row(self, found: Times) -> dict[str, Any]:
        return {name: None if time is None else round(time, 4) for name, time in found._asdict().items()}

    def found_in(self, row: Mapping[str, Any]) -> Times:
        return Times(*(None if row[name] is None else float(row[name]) for name in Times._fields))


def _by(route: Route, sample: AttentionCall, plan: Any = None) -> Callable[[], Tensor] | None:
    """A sample by one of our routes (plan: as it takes it), or None where it does not."""
    plan = route.plan(Request(sample, _CONFIG)) if plan is None else plan
    if isinstance(plan, list):
        return None

    def attempt() -> Tensor:
        if sample.needs_grad:
            return route.with_gradients(sample, _CONFIG, plan)[0]
        return route.forward(sample, _CONFIG, plan, with_lse=False, for_grad=False, stats=None).out

    return attempt


def sample_call(call: AttentionCall, kind: Kind) -> AttentionCall:
    """A call of this kind on the same device: random numbers, and as many heads as make the kind's rows. Without
    gradients all heads share the memory of one."""
    kv_heads = max(1, kind.rows // (kind.q_tokens * kind.groups))
    device = call.query.device
    generator = torch.Generator(device).manual_seed(0)

    def numbers(heads: int, tokens: int, head_dim: int) -> Tensor:
        own_heads = heads if kind.gradients else 1
        shape = (1, own_heads, tokens, head_dim)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(call.query.dtype).expand(1, heads, -1, -1).requires_grad_(kind.gradients)

    mask = None
    if isinstance(call.attn_mask, Tensor):
        rows = kind.q_tokens if kind.mask_rows == 2 else 1
        mask = torch.zeros((1, 1, rows, kind.kv_tokens), dtype=call.attn_mask.dtype, device=device)
        mask = ~mask if mask.dtype == torch.bool else mask
    return check_call(
        numbers(kv_heads * kind.groups, kind.q_tokens, call.head_dim),
        numbers(kv_heads, kind.kv_tokens, call.head_dim),
        numbers(kv_heads, kind.kv_tokens, call.head_dim_v),
        mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=kind.groups > 1,
    )


def _without_numbers(call: AttentionCall) -> AttentionCall:
    """What :func:`sample_call` needs of a call, which can be kept."""
    mask = call.attn_mask
    query, key, value = (t.new_empty(0) for t in (call.query, call.key, call.value))
    return call.with_tensors(query, key, value, mask.new_empty(0) if isinstance(mask, Tensor) else mask)


def _with_gradients(call: AttentionCall, forward: Callable[[], Tensor]) -> Callable[[], Any]:
    if not call.needs_grad:
        return forward

    def both() -> Any:
        out = forward()
        return torch.autograd.grad(out, (call.query, call.key, call.value), out.detach())

    return both
