"""One patched object's attention: decide, run by the core, watch, and count."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa
from ...pascal_attn_core.call import Arguments, AttentionCall, TiledStats, autocast_on, check_call, prepared
from ...pascal_attn_core.machine.device import MIB, device_info
from ...pascal_attn_core.machine.own_thread import inputs_are_made_up
from ...pascal_attn_core.observe.progress import between_blocks
from ...pascal_attn_core.observe.report import mask_kind, record
from ...pascal_attn_core.routes import Choice, choose, why_not
from ...pascal_attn_core.routes.fused import try_early
from ...pascal_attn_core.routes.run import run as run_call
from ...pascal_attn_core.routes.several import device_named, seen_on
from ...pascal_attn_core.routes.tiled import forget_halvings
from ...pascal_attn_core.routes.torch_kernel import TorchForm
from ...pascal_attn_core.tiled.plan import plan_call
from ...pascal_attn_core.vae.banded import Banded
from ..comfy import host
from ..comfy.layout import signature
from . import runs
from .compare import Difference
from .meter import Meter, is_finite, peak_of_run, sample_of, start_of_run
from .runs import PASSED, TAKEN, CallKind, CallTally, Run

log = logging.getLogger("pascal_attn")
Compare = Callable[[Tensor], "Difference | None"]
_DECISIONS = 4096  # kinds of calls, per place in the model, that are remembered at once
_PROGRESS_SECONDS = 1.0
_MORE_PRECISION = {"VAE": "--fp32-vae", "text encoder": "--fp32-text-enc"}  # options of ComfyUI, by part
_REPAIR = AttentionConfig(route="tiled", softmax="online")  # its scores and sums are float32 whatever comes in


@dataclass(frozen=True)
class PatchSettings:
    """The settings of a node that patches attention.

    Attributes:
        config: route, budget and tiles for every call.
        min_keys: a call with fewer keys is left to ComfyUI, unless its score matrix would exceed the budget.
        nan_guard: look at every output, and compute one that is not finite again in float32.
    """

    config: AttentionConfig = field(default_factory=AttentionConfig)
    min_keys: int = 1024
    nan_guard: bool = True

    def budget_bytes(self, device: torch.device) -> float:
        """Most extra memory of one call on this device."""
        budget = self.config.budget_mib
        return device_info(device).default_budget_bytes() if budget is None else budget * MIB

    def text(self, device: torch.device) -> str:
        """``"route auto, budget 64 MiB, from 1024 keys"``."""
        tile = self.config.kv_block
        parts = [f"route {self.config.route}", f"budget {self.budget_bytes(device) / MIB:g} MiB"]
        parts += [] if tile is None else [f"tiles of {tile} keys"]
        if self.config.devices:
            parts.append(f"shared by {' and '.join(self.config.devices)} from {self.config.share_from_tokens} tokens")
        return ", ".join(parts if self.min_keys == 0 else [*parts, f"from {self.min_keys} keys"])


@dataclass(eq=False)
class _Decision:
    """The decision on calls of one kind from one place in the model.

    Attributes:
        kind: how they are counted.
        how: the configuration and the route that they run with; None = they are left to the host.
        template: the first such call without its tensors, where its checks hold for others of the kind.
        run, tally: the run that ``tally`` counts in.
    """

    kind: CallKind
    how: tuple[AttentionConfig, Choice] | None = None
    template: AttentionCall | None = None
    run: Run | None = None
    tally: CallTally | None = None


def left_off(config: AttentionConfig) -> str:
    """``"the fused kernel is left off: ..."`` for a node's status, "" if it is not.

    The kernels are checked here, once on a machine, since a node that patches runs before its model is on the card.
    """
    why = try_early(host.compute_device(), host.make_room) if config.route == "auto" and config.fused else ""
    return f"the fused kernel is left off: {why}" if why else ""


class Engine:
    """Attention for one patched model, VAE or text encoder. Used by several threads at once on multi-GPU hosts."""

    def __init__(self, settings: PatchSettings, subject: str, part: str, unique_id: str | None):
        self.settings, self.subject, self.part, self.unique_id = settings, subject, part, unique_id
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._depth = 0
        self._decisions: dict[tuple[str, Hashable, bool], _Decision] = {}
        self._differing: dict[Hashable, str] = {}  # kinds of calls that the host answers otherwise, and how far apart
        self._metered: set[tuple] = set()
        self.is_compiled = False  # torch.compile took calls into its graph, where none is counted
        self._finite_inputs = True  # until a call's inputs were found not to be
        self._handled = 0  # id of the exception that was being handled when the run began

    def share(self, devices: tuple[str, ...], least_tokens: int) -> None:
        """Share calls of at least ``least_tokens`` queries and keys out over devices, the first of which has the model;
        () = on none but their own. All kinds of calls are decided again: the reason against sharing may be gone."""
        config = replace(self.settings.config, devices=devices, share_from_tokens=least_tokens)
        with self._lock:
            if devices or config != self.settings.config:
                self.settings = replace(self.settings, config=config)
                self._decisions.clear()

    # ---- runs ----

    def begin(self) -> Run:
        """A sampling, decoding or encoding starts; nested and parallel ones are part of the first."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._handled = id(sys.exc_info()[1])
            stray = self._run if self._depth == 1 else None
            if stray is not None:  # from calls of the model outside of a sampling: nothing said when they were over
                self._run = None
                stray.finish()
            return self.run

    def end(self) -> Run | None:
        """The sampling, decoding or encoding is over, also after an error: the outermost one's run, or None."""
        with self._lock:
            self._depth = max(0, self._depth - 1)
            run = self._run
            if self._depth or run is None:
                return None
            self._run = None
        if self.failure:
            run.note(f"ended early by {self.failure}: the figures cover the time until then")
        for device in {run.device, *run.devices}:
            peak = peak_of_run(torch.device(device))
            if peak is not None:
                run.saw_memory(peak)
        run.finish()
        return run

    @property
    def failure(self) -> str:
        """The class of the exception that the run is ending with, "" without one."""
        error = sys.exc_info()[1]
        return "" if error is None or id(error) == self._handled else type(error).__name__

    @property
    def is_running(self) -> bool:
        return self._run is not None

    @property
    def run(self) -> Run:
        """The run in progress; one is begun where a host calls the model without saying that it starts."""
        with self._lock:
            if self._run is None:
                device, prompt = host.compute_device(), host.prompt_id()
                if not prompt or all(run.prompt_id != prompt for run in runs.remembered()):
                    forget_halvings()  # what ran out of memory in an earlier prompt may fit in this one
                begun = Run(self.subject, self.part, self.describe(), str(device), self.unique_id, prompt)
                self._run = runs.remember(begun)
                start_of_run(device)
                self._metered.clear()
                self._finite_inputs = True
            return self._run

    def describe(self) -> str:
        """The settings as one line, for the device that ComfyUI computes on."""
        return self.settings.text(host.compute_device())

    # ---- one call ----

    def attend(
        self, given: Arguments, block: str = "", kind: Hashable = None, compare: Compare | None = None
    ) -> Tensor | None:
        """``[B, Hq, L, D] x [B, Hkv, S, D] x [B, Hkv, S, Dv] -> [B, Hq, L, Dv]``; None = the host shall do it, and the
        run knows why.

        block: of the model, that it comes from, as ``CallKind`` has it.
        kind: equal for calls with equal arguments but for the numbers in their tensors: read from the tensors if None.
        compare: how far an answer is from the host's own; asked once per kind in each run. A kind of call that is
            further away than rounding explains is left to the host from then on.
        """
        if torch.compiler.is_compiling():
            self.is_compiled = True
            return sdpa(*given[:8], config=self.settings.config)
        if self.part == "VAE" and (inputs_are_made_up() or type(given.query) is Banded):
            return self._attend_in_bands(given, block)
        # A TorchFunctionMode around the model would look at every operator of every tile.
        with torch._C.DisableTorchFunction():
            if kind is None:
                kind = signature(given, {})
            taken = self._take(given, block, kind)
            if taken is None:
                return None
            call, decision = taken
            out, run = self._run_watched(call, decision), decision.run
            if compare is None or run is None or kind in run.compared or runs.stale(call.query.device):
                return out
            return out if self._agrees(decision, kind, compare, out) else None

    def _take(self, given: Arguments, block: str, kind: Hashable) -> tuple[AttentionCall, _Decision] | None:
        """The checked call, and what is done with its kind; None = the host's, which is counted."""
        known = (block, kind, torch.is_grad_enabled())
        decision = self._decisions.get(known)
        if decision is not None and decision.how is None:
            self._count(decision)
            return None
        try:
            template = None if decision is None else decision.template
            if template is not None and not autocast_on(given.query):
                call = template.with_tensors(*given[:4], template.sinks)
            else:
                ready = prepared(given)
                call = check_call(ready)
                if decision is None or ready.query is not given.query:  # under autocast
                    decision = self._decide(call, known)
                    plain = ready is given and not torch.is_grad_enabled()
                    decision.template = call.without_tensors() if plain else None
            assert decision is not None
            if decision.how is not None:
                return call, decision
        except (TypeError, ValueError, UnsupportedAttention) as error:
            self.leave(block, str(error), kind)
        except Exception as error:  # whatever a tensor class of another pack may raise
            self.leave_unread(block, error)
        else:
            self._count(decision)
        return None

    def _attend_in_bands(self, given: Arguments, block: str) -> Tensor | None:
        """A call of a VAE that runs in bands, or tries whether it can, which is not counted."""
        config, out, start = self.settings.config, None, time.perf_counter()
        with record() as report, between_blocks(self._checkpoint(block)):
            for route in dict.fromkeys((config.route, "auto")):
                try:
                    config = replace(config, route=route)
                    out = sdpa(*given[:8], config=config)
                    break
                except (TypeError, ValueError, UnsupportedAttention) as error:
                    why = str(error)
        if inputs_are_made_up():
            return out
        if out is None:
            self.leave(block, why)
            return None
        routes = "+".join(sorted(report.routes()))
        query, shapes = given.query, (tuple(given.query.shape), tuple(given.key.shape))
        dtype = str(query.dtype).removeprefix("torch.")
        kind = CallKind(block, TAKEN, routes, "in bands of its queries", *shapes, dtype)
        tally = self.run.tally(kind)
        with self.run.lock:
            tally.count += 1
            tally.elapsed_ms += (time.perf_counter() - start) * 1e3 if query.device.type == "cpu" else 0.0
        return out

    def is_left(self, block: str, kind: Hashable) -> bool:
        """Whether calls of this kind from there are known to be the host's; counted if so."""
        decision = self._decisions.get((block, kind, torch.is_grad_enabled()))
        if decision is None or decision.how is not None:
            return False
        self._count(decision)
        return True

    def leave(self, block: str, why: str, kind: Hashable = None) -> None:
        """Count a call that the host computes itself; remembered for calls of the same ``kind`` from there."""
        if torch.compiler.is_compiling():
            return
        decision = _Decision(CallKind(block, PASSED, "", why))
        if kind is not None:
            self._remember((block, kind, torch.is_grad_enabled()), decision)
        self._count(decision)

    def leave_unread(self, block: str, error: Exception) -> None:
        """Count a call that could not even be read as one for the host, and say so.

        Raises:
            Exception: ``error`` itself if it is the user's Cancel.
        """
        if host.is_interrupt(error):
            raise error
        why = f"reading it failed with {type(error).__name__}: {error}"
        self.warn(f"{block or 'a call'}: {why}: passed to ComfyUI")
        self.leave(block, why)

    def _count(self, decision: _Decision) -> None:
        """Count one more call of this kind."""
        run = self._run or self.run
        if decision.run is not run:
            decision.tally, decision.run = run.tally(decision.kind), run
        with run.lock:
            decision.tally.count += 1  # type: ignore[union-attr]

    def _decide(self, call: AttentionCall, known: tuple[str, Hashable, bool]) -> _Decision:
        block, kind, _ = known
        why = self._differing.get(kind, "") or self._why_left(call)
        if why:
            decision = _Decision(_kind(block, call, PASSED, "", why))
        else:
            config = self._config_for(call, block)
            choice = choose(call, config)
            more = {"over_torch": choice.over_torch, "torch_stores": choice.torch_stores}
            counted = _kind(block, call, TAKEN, choice.route, choice.why, **more)
            decision = _Decision(counted, (config, choice))
        self._remember(known, decision)
        return decision

    def _remember(self, known: tuple[str, Hashable, bool], decision: _Decision) -> None:
        if len(self._decisions) > _DECISIONS:  # a video of ever different lengths
            self._decisions.clear()
        with suppress(TypeError):  # an argument that has no hash
            self._decisions[known] = decision

    def _why_left(self, call: AttentionCall) -> str:
        least = self.settings.min_keys
        if call.seq_len_kv >= least:
            return ""
        score_bytes = call.num_scores * max(4, call.query.element_size())
        return f"fewer than {least} keys" if score_bytes <= self.settings.budget_bytes(call.query.device) else ""

    def _config_for(self, call: AttentionCall, block: str) -> AttentionConfig:
        """The node's configuration, less what this call cannot have: a model runs on, and the report names it."""
        config = self.settings.config
        if config.route != "auto" and (reasons := why_not(config.route, call, config)):
            self.warn(f"route {config.route} cannot take every call ({block}: {'; '.join(reasons)}): these use auto")
            config = replace(config, route="auto")
        for candidate in (config, replace(config, kv_block=None), replace(config, kv_block=None, budget_mib=None)):
            try:
                plan_call(call, device_info(call.query.device), candidate)
                return candidate
            except ValueError as error:
                self.warn(f"{block}: {error}: the automatic value is used instead")
        return config

    def _run_watched(self, call: AttentionCall, decision: _Decision) -> Tensor:
        host.throw_if_interrupted()
        run, kind, device = self._run or self.run, decision.kind, call.query.device
        assert decision.how is not None
        config, choice = decision.how
        asked, is_new = not runs.stale(device), decision.run is not run
        if is_new:
            decision.tally, decision.run = run.tally(kind), run
            if asked and run.saw_device(device) and str(device) != run.device:
                start_of_run(device)
        tally = decision.tally
        assert tally is not None
        if config.devices:
            seen_on(device, [device_named(name) for name in config.devices])
        with run.lock:
            tally.count += 1
        stats = TiledStats() if choice.route in ("tiled", "several") else None
        shapes = (kind.route, kind.query, kind.key, kind.mask)
        meter = Meter(run, tally, device, measures=asked and is_new and shapes not in self._metered)
        self._metered |= {shapes} if meter.measures else set()
        form = choice.plan
        one_kernel = form.is_one_call if isinstance(form, TorchForm) else choice.route in ("torch", "math")
        with nullcontext() if one_kernel else between_blocks(self._checkpoint(kind.block)), meter:
            out = run_call(call, config, with_lse=False, choice=choice, stats=stats)[0]
            meter.out_bytes = out.numel() * out.element_size()
        if asked and self.settings.nan_guard and not is_finite(out):
            out = self._repaired(call, out, kind.block, tally)
        if stats is not None:
            tally.add(stats)
            for remark in stats.remarks:
                run.note(remark)
        if is_new and asked and (run.sample is None or kind.math_bytes > run.sample.kind.math_bytes):
            run.sample = sample_of(call, kind, out) or run.sample
        return out

    def _agrees(self, decision: _Decision, kind: Hashable, compare: Compare, out: Tensor) -> bool:
        """Whether our answer to the first call of a kind in this run is the host's. If not, the call is taken back, and
        calls of the kind are left to the host from now on."""
        run, counted = decision.run, decision.kind
        assert run is not None
        run.compared[kind] = None
        try:
            with torch.no_grad():  # gradient checkpointing counts what is saved, and compares only once
                found = run.compared[kind] = compare(out)
        except Exception as error:
            if host.is_interrupt(error):
                raise
            why = f"{type(error).__name__}: {error}"
            run.note(f"{counted.block}: could not be compared with ComfyUI's own function: {why}")
            return True
        if found is None or found.is_rounding:
            return True
        why = f"our result is {found.text()}"
        self._differing[kind] = why
        for known in [known for known in self._decisions if known[1] == kind]:
            self._decisions.pop(known, None)
        run.take_back(counted)
        self.warn(f"{counted.block}: {why}: calls like this are passed to ComfyUI")
        self.leave(counted.block, why, kind)
        return False

    def _repaired(self, call: AttentionCall, out: Tensor, block: str, tally: Any) -> Tensor:
        """An output that was not finite, computed again in float32 if its inputs are finite."""
        named = {"query": call.query, "key": call.key, "value": call.value}
        bad = [name for name, tensor in named.items() if not is_finite(tensor)]
        if bad:
            if self._finite_inputs:
                self._finite_inputs = False
                self.warn(
                    f"{block}: {' and '.join(bad)} already held NaN or infinity before attention: the image will be "
                    f"black or noise; try {_MORE_PRECISION.get(self.part, '--force-fp32')} or another weight dtype "
                    f"({call.query.dtype} here)"
                )
            return out
        again = run_call(call, _REPAIR, with_lse=False)[0]
        tally.repaired += 1
        healed = is_finite(again)
        done = "recomputed in float32" if healed else "not finite in float32 either"
        self.warn(f"{block}: the attention output was not finite in {call.query.dtype}: {done}")
        return again if healed else out

    def warn(self, sentence: str) -> None:
        """A sentence for the report, and once per run for the log."""
        if self.run.warn(sentence):
            log.warning("pascal_attn: %s: %s", self.subject, sentence)

    def _checkpoint(self, block: str) -> Callable[[int, int], None]:
        last = time.monotonic()

        def checkpoint(done: int, total: int) -> None:
            nonlocal last
            host.throw_if_interrupted()
            now = time.monotonic()
            if now - last > _PROGRESS_SECONDS and done < total:
                last = now
                host.send_status(f"{self.subject}, {block}: attention {done / total:.0%}", self.unique_id)

        return checkpoint


def _kind(block: str, call: AttentionCall, outcome: str, route: str, why: str, **more: Any) -> CallKind:
    mask = mask_kind(call.attn_mask, is_causal=call.is_causal, left=call.left, right=call.right)
    shapes, dtype = (tuple(call.query.shape), tuple(call.key.shape)), str(call.query.dtype).removeprefix("torch.")
    return CallKind(block, outcome, route, why, *shapes, dtype, mask, **more)
