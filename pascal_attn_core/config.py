"""AttentionConfig: every choice a user can make, checked once. The only module that reads ``os.environ``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import re
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

log = logging.getLogger("pascal_attn")

known_routes = ["auto"]  # what a config may name; routes.run adds the names of its list
ENV_PREFIX = "PASCAL_ATTN_"
# Read by other modules, not fields of a config: auto and the ComfyUI pack, sdpa_patch (three), fused.trust.trial,
# contest.timing_table, ffn.
SWITCHES = (
    "PASCAL_ATTN_FLASH",
    "PASCAL_ATTN_ENABLE",
    "PASCAL_ATTN_DISABLE",
    "PASCAL_ATTN_MIN_KEYS",
    "PASCAL_ATTN_TRUST",
    "PASCAL_ATTN_NO_TIMING",
    "PASCAL_ATTN_FFN_CHUNKS",
)


@dataclass(frozen=True)
class AttentionConfig:
    """Options of :func:`pascal_attn_core.sdpa`. Immutable; derive another with :func:`dataclasses.replace`.

    Every field can also be set by the environment variable ``PASCAL_ATTN_<FIELD>`` (see :meth:`from_env`).
    Order of precedence: argument, environment, default.

    Attributes:
        route: ``"auto"`` (the fastest route that takes the call), or one of ``"fused-tensor"`` (float16 on the tensor
            cores of sm_70 and newer; float16 and bfloat16 on AMD's matrix units), ``"fused"``, ``"torch"``,
            ``"tiled"``, ``"math"``. A named route that cannot take a call raises :class:`UnsupportedAttention`.
            ``"fused-int8"``, never chosen by ``"auto"``, computes both products in 8-bit integers (sm_61 and newer, no
            gradients; not exact: relative error about 1e-2).
        fused: whether the fused kernel may be used at all.
        budget_mib: largest extra memory of one call in MiB: everything but the inputs and the output; in the backward
            pass everything but the gradients and, for 16-bit inputs, the float32 sums of one key/value head's
            gradients. None = 64 on a GPU; 4 on a CPU, 6.5 for the backward pass; then copies no larger than the inputs
            may take a quarter of the free memory.
        q_block: query tokens per tile; None = chosen from the device, the shapes and the budget.
        kv_block: key tokens per tile; None = chosen likewise. The budget holds for a given tile size too: the call
            raises ValueError if the tile does not fit.
        softmax: ``"auto"`` skips the running row maximum where the scores are provably bounded, ``"online"`` always
            computes it.
        math_limit_mib: a score matrix up to this size in MiB may go to torch's math attention.
        trim_masks: read the values of a mask to skip keys and tiles that are fully masked. On a GPU this
            costs one synchronisation per masked call.
        devices: two or more, such as ``("cuda:0", "cuda:1")``: calls whose tensors are on the first are divided among
            all of them if that is faster; see docs/several-cards.md.
        share_from_tokens: calls with fewer queries or keys stay on the first device.
    """

    route: str = "auto"
    budget_mib: float | None = None
    q_block: int | None = None
    kv_block: int | None = None
    softmax: str = "auto"
    math_limit_mib: float = 1.0
    trim_masks: bool = True
    fused: bool = True
    devices: tuple[str, ...] = ()
    share_from_tokens: int = 1024

    token: ClassVar[str] = ""
    """The fields that differ from the default as one string, ``"route=tiled;budget_mib=16"``: a value that a custom
    operator's schema can carry. :meth:`from_token` is its inverse."""

    def __post_init__(self) -> None:
        _one_of("route", self.route, tuple(known_routes))
        _one_of("softmax", self.softmax, ("auto", "online"))
        for name, (kind, least, most) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or getattr(AttentionConfig, name) is not None:
                check_number(name, value, kind, least, most)
        check_bools(self, "trim_masks", "fused")
        object.__setattr__(self, "devices", _device_names(self.devices))
        values = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        changed = ((name, value) for name, value, default in values if value != default)
        parts = (f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in changed)
        object.__setattr__(self, "token", ";".join(parts))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_token(token: str) -> AttentionConfig:
        """The config that has this :attr:`token`."""
        parts = (part.partition("=") for part in token.split(";") if part)
        changes = {name: _parse(getattr(AttentionConfig, name), name, text) for name, _, text in parts}
        return AttentionConfig(**changes)

    @staticmethod
    def from_env(environ: dict[str, str] | None = None) -> AttentionConfig:
        """The default config changed by ``PASCAL_ATTN_<FIELD>`` variables, e.g. ``PASCAL_ATTN_BUDGET_MIB=16``.

        An empty value counts as unset. An invalid value, or an unknown name that starts with ``PASCAL_ATTN_``, is
        reported once in the log, with what was expected, and ignored: a variable set for something else must not stop a
        program.

        Args:
            environ: the variables to read; None = ``os.environ``.
        """
        source = os.environ if environ is None else environ
        fields = {field.name: field for field in dataclasses.fields(AttentionConfig)}
        changes: dict[str, Any] = {}
        for name, text in source.items():
            if not name.startswith(ENV_PREFIX) or name in SWITCHES or not text.strip():
                continue
            field_name = name[len(ENV_PREFIX) :].lower()
            if field_name not in fields:
                log_once(logging.WARNING, "%s", _unknown(name, tuple(fields)))
                continue
            try:
                value = _parse(fields[field_name].default, field_name, text)
                AttentionConfig(**{field_name: value})
            except (ValueError, TypeError) as error:
                log_once(logging.WARNING, "%s is ignored: %s", name, str(error))
            else:
                changes[field_name] = value
        return AttentionConfig(**changes)


def switched_on(name: str) -> bool:
    """Whether an environment variable of SWITCHES is on; unset or empty is off, and so is, with a warning, an invalid
    value."""
    text = os.environ.get(name, "").strip().lower()
    if text not in ("", *_WORDS):
        log_once(
            logging.WARNING, f"%s is ignored: it must be one of {sorted(_WORDS)}, got %s", name, reprlib.repr(text)
        )
    return _WORDS.get(text, False)


def variables(prefix: str) -> dict[str, str]:
    """The environment variables, of other programs too, whose names begin so, without those that are empty."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix) and value}


def number_of(name: str) -> int:
    """A whole number in an environment variable of SWITCHES; 0 where it is unset, empty or, with a warning, invalid."""
    text = os.environ.get(name, "").strip() or "0"
    if text.isascii() and text.isdigit():
        return int(text[:9])
    log_once(logging.WARNING, "%s is ignored: it must be a whole number, got %s", name, reprlib.repr(text))
    return 0


class Unsupported(Exception):
    """Something cannot be done in the way that was asked for; nothing has been changed. Every refusal of this package
    is one of these. ``.reasons`` lists why, one sentence each."""

    def __init__(self, *reasons: str):
        self.reasons = list(reasons)
        super().__init__("; ".join(reasons))


class RouteUnavailable(Unsupported, RuntimeError):
    """A route has found while running that it cannot take a call. Nothing has been computed, and from now on the route
    gives this as its reason."""


class UnsupportedAttention(Unsupported, NotImplementedError):
    """The named route cannot take the call. ``.reasons`` lists why, one string per reason."""

    def __init__(self, route: str, reasons: list[str]):
        super().__init__(*reasons)
        self.route = route
        hint = "" if route == "auto" else "; use route='auto'"
        self.args = (f"route {route!r} cannot take this call: {'; '.join(reasons)}{hint}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.route, self.reasons), self.__dict__


@functools.lru_cache(maxsize=1)
def default_config() -> AttentionConfig:
    """The config used when a call passes none: that of the environment, read once at the first call."""
    return AttentionConfig.from_env()


def config_of(config: AttentionConfig | None) -> AttentionConfig:
    """The config of a call: the one that it passes, or the default. A TypeError where it is none."""
    if config is None:
        return default_config()
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config must be an AttentionConfig or None, got {config!r}")
    return config


def cache_folder() -> Path | None:
    """Where compiled kernels, verdicts on them and timings are stored: the platform's cache folder of the user. None if
    there is none, as for a user without a home folder, or if another user could have written there; this is logged
    once."""
    try:
        if sys.platform == "win32":
            root = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            root = Path.home() / "Library" / "Caches"
        else:
            root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        log_once(logging.INFO, "nothing is kept on disk: %s", str(error))
        return None
    folder = Path(root) / "pascal-attention"
    others = _others_may_write(folder)
    if others:
        log_once(logging.INFO, "nothing is kept on disk, nor read from there: %s", others)
    return None if others else folder


def _others_may_write(folder: Path) -> str:
    """Why a folder may hold what another user has written, "" if it cannot."""
    try:
        found = folder.stat()
    except OSError:  # there is none yet
        return ""
    if sys.platform == "win32":  # there each user's folder has its own access list
        return ""
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {found.st_uid})"
    return f"other users may write to {folder}; chmod 700 it after a look at it" if found.st_mode & 0o022 else ""


_TOKENS = (int, 1, (1 << 31) - 1)
_MOST_MIB = 1 << 40  # in bytes still a number of 64 bits
# The fields that are numbers: their kind, and the least and the largest value.
_NUMBERS: dict[str, tuple[type, float, int]] = {
    "budget_mib": (float, 1 / 16, _MOST_MIB),
    "math_limit_mib": (float, 0, _MOST_MIB),
    **dict.fromkeys(("q_block", "kv_block", "share_from_tokens"), _TOKENS),
}
_KINDS = {float: "a number", int: "a whole number"}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse(default: Any, name: str, text: str) -> Any:
    text = text.strip()
    if isinstance(default, bool):
        if text.lower() not in _WORDS:
            raise ValueError(f"{name} must be one of {sorted(_WORDS)}, got {reprlib.repr(text)}")
        return _WORDS[text.lower()]
    if name in _NUMBERS:
        if text.lower() in ("none", "auto") and default is None:
            return None
        kind = _NUMBERS[name][0]
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{name} must be {_KINDS[kind]}, got {reprlib.repr(text)}") from None
    if isinstance(default, tuple):
        return tuple(part.strip().lower() for part in text.split(",") if part.strip())
    return text.lower()


def _unknown(name: str, fields: tuple[str, ...]) -> str:
    known = [*fields, *(switch[len(ENV_PREFIX) :].lower() for switch in SWITCHES)]
    near = difflib.get_close_matches(name[len(ENV_PREFIX) :].lower(), known, n=1)
    names = [ENV_PREFIX + other.upper() for other in (near or known)]
    return f"unknown environment variable {name}; " + (f"did you mean {names[0]}?" if near else f"there are {names}")


@functools.lru_cache(maxsize=256)
def log_once(level: int, text: str, *values: str) -> None:
    """Log a sentence the first time that it is said."""
    log.log(level, text, *values)


_DEVICE_NAME = re.compile(r"[a-z]+(:\d+)?")


def _device_names(devices: Any) -> tuple[str, ...]:
    expected = "devices must be two or more names of devices, such as ('cuda:0', 'cuda:1'), or ()"
    if not isinstance(devices, (tuple, list)):
        raise TypeError(f"{expected}, got {reprlib.repr(devices)}")
    names = tuple(str(device) for device in devices)
    if len(names) == 1 or not all(_DEVICE_NAME.fullmatch(name) for name in names):
        raise ValueError(f"{expected}, got {reprlib.repr(devices)}")
    return names


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {reprlib.repr(value)}")


def check_number(
    name: str, value: Any, kind: Any, least: float, most: float = float("inf"), *, above: bool = False
) -> None:
    """Raise a TypeError or a ValueError where a value is no finite number of this kind from ``least`` to ``most``;
    ``above``: ``least`` itself is none either."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise TypeError(f"{name} must be {_KINDS[kind]}, got {reprlib.repr(value)}")
    if not least <= value < float("inf") or (above and value == least):
        bound = f"{'above' if above else 'at least'} {least}{' and finite' * (kind is float)}"
        raise ValueError(f"{name} must be {bound}, got {reprlib.repr(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {reprlib.repr(value)}")


def check_bools(given: Any, *names: str) -> None:
    """Raise a TypeError where one of these attributes is no bool."""
    for name in names:
        if not isinstance(getattr(given, name), bool):
            raise TypeError(f"{name} must be a bool, got {getattr(given, name)!r}")
