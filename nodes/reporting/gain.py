"""The gain of a run, or why there was nothing to gain: the report's first line, and the line on a node.

Nothing is estimated. Bytes are those of one call: what torch's own function would have stored, its score matrix, less
what the call took here; seconds are those of calls whose route was timed on this machine against torch's kernel. Of a
host that does not use torch's function nothing is claimed but what was not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...pascal_attn_core.machine.device import MIB
from ..comfy import host
from ..engine.runs import TAKEN, CallKind, CallTally, Run, remembered
from .words import duration_text, plural, share_text, size_text

SDPA = "attention_pytorch"  # ComfyUI's name of its function that calls torch's
_LEAST_BYTES, _LEAST_SECONDS = 8 * MIB, 0.1  # less is not worth telling


def say(run: Run) -> None:
    """Log a run that is over, and write it on its node: for a node with several parts, one sentence about what they
    have gained, and how many of their calls they took."""
    finished = (other for other in remembered() if other.finished and other.identity[-2:] == run.identity[-2:])
    ours = list({other.part: other for other in finished}.values())
    status = ""
    if len(ours) > 1:
        taken, calls = sum(other.count(TAKEN) for other in ours), sum(other.count() for other in ours)
        counted = f" {taken:,} of {calls:,} attention calls taken." if calls else ""
        status = gain_line(ours, host.attention_name()) + counted
    host.say(run.line(), run.unique_id, status)


def gain_line(runs: Sequence[Run], attention: str) -> str:
    """One sentence for all runs of a report: ``"Gained: ..."``, or why nothing was."""
    text = _gained(runs, attention)
    return f"Gained: {text}." if text else f"{_nothing_because(runs, attention)}."


def _gained(runs: Sequence[Run], attention: str) -> str:
    """``"1.63 GiB less memory in the largest call (64.0 MiB instead of 1.69 GiB), 41 s less in attention (timed on this
    machine)"`` and so on: what is worth telling; "" = nothing is."""
    taken, found = _taken(runs), []
    if attention == SDPA:
        stored = [(kind.math_bytes, tally.extra_bytes) for kind, tally in taken if kind.torch_stores]
        theirs, ours = max(stored, key=lambda pair: pair[0] - (pair[1] or 0), default=(0, 0))
        saved = theirs - (ours or 0)
        if saved >= _LEAST_BYTES and ours is None:
            found.append(f"{size_text(theirs)} of scores never stored in the largest call")
        elif saved >= _LEAST_BYTES:
            less = f"{size_text(ours or 0)} instead of {size_text(theirs)}"
            found.append(f"{size_text(saved)} less memory in the largest call ({less})")
        timed = [(kind.over_torch, tally.elapsed_ms / 1e3) for kind, tally in taken]
        seconds = sum(took * (1 / over_torch - 1) for over_torch, took in timed if over_torch)
        if seconds >= _LEAST_SECONDS:
            found.append(f"{duration_text(seconds)} less in attention (timed on this machine)")
    if repaired := sum(tally.repaired for _, tally in taken):
        found.append(f"{plural(repaired, 'output')} saved from NaN")
    return "; ".join([*(sentence for run in runs for sentence in run.gains[:1]), *filter(None, [", ".join(found)])])


def _taken(runs: Sequence[Run]) -> list[tuple[CallKind, CallTally]]:
    return [(kind, tally) for run in runs for kind, tally in list(run.tallies.items()) if kind.is_taken]


def _nothing_because(runs: Sequence[Run], attention: str) -> str:
    """Why nothing was gained, without a full stop."""
    calling = [run for run in runs if run.tallies]
    if not calling:
        why = "; ".join(run.notes[0] for run in runs if run.notes)
        return f"Nothing gained: {why or 'no attention call reached a patch'}"
    taken = _taken(calling)
    if not taken:
        counts = Counter[str]()
        for run in calling:
            counts.update(run.reasons())
        ((why, count),), total = counts.most_common(1), counts.total()
        most = f"{'all' if count == total else f'{count:,} of'} {plural(total, 'call')} passed to ComfyUI"
        return f"Nothing to gain: {most}: {why}"
    share = _share_text(calling)
    if attention == SDPA and all(kind.torch_stores is False for kind, _ in taken):
        return f"Nothing to gain: PyTorch's own kernel takes every call here, with or without this node{share}"
    extra = max((tally.extra_bytes for _, tally in taken if tally.extra_bytes is not None), default=None)
    scores = max(kind.math_bytes for kind, _ in taken)
    never = f"{size_text(scores)} of scores in a call are never stored" if scores >= _LEAST_BYTES else ""
    if never and ("split" in attention or "sub_quad" in attention):
        never += f" (ComfyUI's own {attention} splits them, too)"
    most = "" if extra is None else f"{size_text(extra)} extra at most in a call"
    return f"Fits: {', '.join(filter(None, [never, most])) or 'small calls only'}{share}"


def _share_text(runs: Sequence[Run]) -> str:
    """``"; attention is 4% of sampling"``; "" where it is not known."""
    sampling = [run for run in runs if run.part == "diffusion model" and run.share is not None]
    spent, whole = sum(run.elapsed_ms / 1e3 for run in sampling), sum(run.elapsed_s for run in sampling)
    return f"; attention is {share_text(min(1.0, spent / whole))} of sampling" if spent and whole else ""
