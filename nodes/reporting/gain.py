"""The gain of a run, or why there was nothing to gain: the report's first line, and the line on a node.

Nothing is estimated. Bytes are those of one call: what torch's own function would have stored, its score matrix, less
what the call took here; seconds are those of calls whose route was timed on this machine against torch's kernel. Of a
host that does not use torch's function nothing is claimed but what was not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...pascal_attn_core.machine.device import MIB
from ..comfy import host
from ..engine.runs import CallKind, CallTally, Run, remembered
from .words import duration_text, plural, share_text, size_text

SDPA = "attention_pytorch"  # ComfyUI's name of its function that calls torch's
_LEAST_BYTES, _LEAST_SECONDS = 8 * MIB, 0.1  # less is not worth telling


def say(run: Run) -> None:
    """Log a run that is over, and write it on its node: for a node with several parts, one sentence about what they
    have gained, and how many of their calls they took in their newest runs."""
    here = run.unique_id, run.prompt_id
    finished = (other for other in remembered() if other.finished and (other.unique_id, other.prompt_id) == here)
    ours = list({other.part: other for other in finished}.values())
    status = ""
    if len(ours) > 1:
        taken, calls = sum(other.count("taken") for other in ours), sum(other.count() for other in ours)
        counted = f" {taken:,} of {calls:,} attention calls taken." if calls else ""
        status = gain_line(ours, host.attention_name()) + counted
    host.say(run.line(), run.unique_id, status)


def gain_line(runs: Sequence[Run], attention: str) -> str:
    """One sentence for all runs of a report: ``"Gained: ..."``, or why nothing was."""
    text = _gained(runs, attention)
    return f"Gained: {text}." if text else f"{nothing_because(runs, attention)}."


def is_gain(runs: Sequence[Run], attention: str) -> bool:
    return bool(_gained(runs, attention))


def _gained(runs: Sequence[Run], attention: str) -> str:
    in_attention = ", ".join(_gains_of(_taken(runs), attention))
    return "; ".join([*(sentence for run in runs for sentence in run.gains[:1]), *filter(None, [in_attention])])


def _gains_of(taken: list[tuple[CallKind, CallTally]], attention: str) -> Iterator[str]:
    """``"1.63 GiB less memory in the largest call (64.0 MiB instead of 1.69 GiB)"`` of the call in which torch's
    function and ours differ most, ``"41 s less in attention (timed on this machine)"`` and so on: what is worth
    telling."""
    if attention == SDPA:
        stored = [(kind.math_bytes, tally.extra_bytes) for kind, tally in taken if kind.torch_stores]
        theirs, ours = max(stored, key=lambda pair: pair[0] - (pair[1] or 0), default=(0, 0))
        saved = theirs - (ours or 0)
        if saved >= _LEAST_BYTES and ours is None:
            yield f"{size_text(theirs)} of scores never stored in the largest call"
        elif saved >= _LEAST_BYTES:
            less = f"{size_text(ours or 0)} instead of {size_text(theirs)}"
            yield f"{size_text(saved)} less memory in the largest call ({less})"
        timed = [(kind.over_torch, tally.elapsed_ms / 1e3) for kind, tally in taken]
        seconds = sum(took * (1 / over_torch - 1) for over_torch, took in timed if over_torch)
        if seconds >= _LEAST_SECONDS:
            yield f"{duration_text(seconds)} less in attention (timed on this machine)"
    repaired = sum(tally.repaired for _, tally in taken)
    if repaired:
        yield f"{plural(repaired, 'output')} saved from NaN"


def _taken(runs: Sequence[Run]) -> list[tuple[CallKind, CallTally]]:
    return [(kind, tally) for run in runs for kind, tally in list(run.tallies.items()) if kind.outcome == "taken"]


def nothing_because(runs: Sequence[Run], attention: str) -> str:
    """Why nothing was gained, without a full stop."""
    calling = [run for run in runs if run.tallies]
    if not calling:
        why = "; ".join(run.notes[0] for run in runs if run.notes)
        return f"Nothing gained: {why or 'no attention call reached a patch'}"
    taken = _taken(calling)
    if not taken:
        counts = sum((Counter(run.counted(lambda kind: kind.why)) for run in calling), Counter[str]())
        ((why, count),), total = counts.most_common(1), counts.total()
        most = f"{'all' if count == total else f'{count:,} of'} {plural(total, 'call')} passed to ComfyUI"
        return f"Nothing to gain: {most}: {why}"
    share = _share_text(calling)
    if attention == SDPA and all(kind.torch_stores is False for kind, _ in taken):
        return f"Nothing to gain: PyTorch's own kernel takes every call here, with or without this node{share}"
    known = [tally.extra_bytes for _, tally in taken if tally.extra_bytes is not None]
    scores = max(kind.math_bytes for kind, _ in taken)
    never = f"{size_text(scores)} of scores in a call are never stored" if scores >= _LEAST_BYTES else ""
    most = f"{size_text(max(known))} extra at most in a call" if known else ""
    return f"Fits: {', '.join(filter(None, [never, most])) or 'small calls only'}{share}"


def _share_text(runs: Sequence[Run]) -> str:
    """``"; attention is 4% of sampling"``; "" where it is not known."""
    sampling = [run for run in runs if run.part == "diffusion model" and run.share is not None]
    spent, whole = sum(run.elapsed_ms / 1e3 for run in sampling), sum(run.elapsed_s for run in sampling)
    return f"; attention is {share_text(min(1.0, spent / whole))} of sampling" if spent and whole else ""
