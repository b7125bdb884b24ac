"""The packages that programs import and that cannot be installed everywhere: flash-attn, SageAttention, xformers.

    from pascal_attn_core.stand_ins import patch_imports

    patch_imports()                  # programs that import one of them from here on find our functions

A real package that is installed stays if it can run on a card of this machine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection

from ..config import switched_on, variables
from ..flash_attn import patch_flash_attn
from ..patching.patch import OFF, ON, REFUSED, Patch, PatchReport, State
from ..patching.stand_in import Around
from .sageattention import patch_sageattention
from .xformers import patch_xformers

__all__ = ["ImportsPatch", "patch_imports", "patch_sageattention", "patch_xformers"]

log = logging.getLogger("pascal_attn")

# package -> the functions of which the first that finds no real package puts it in
STAND_INS: dict[str, tuple[Callable[..., Patch], ...]] = {
    "flash_attn": (patch_flash_attn, functools.partial(patch_flash_attn, fa3=None)),
    "sageattention": (patch_sageattention,),
    "xformers": (patch_xformers,),
}


class ImportsPatch(Patch):
    """The Patch of :func:`patch_imports`: its report has a state for each package."""

    def __init__(self, patches: dict[str, Patch], refused: dict[str, str]):
        super().__init__("imports", self._undo_all, sites=len(patches))
        self._patches, self._refused = patches, refused

    def report(self) -> PatchReport:
        taken = [State(name, ON if patch.active else OFF) for name, patch in self._patches.items()]
        return PatchReport([*taken, *(State(name, REFUSED, why) for name, why in self._refused.items())])

    def _undo_all(self) -> None:
        for patch in self._patches.values():
            patch.remove()


def patch_imports(
    *, without: Collection[str] = (), replace: bool | None = None, around: Around | None = None
) -> ImportsPatch:
    """:func:`patch_flash_attn`, :func:`patch_sageattention` and :func:`patch_xformers` at once.

    Args:
        without: the packages that are left alone: "flash_attn", "sageattention", "xformers".
        replace: whether ours take the place of real packages that are installed; None = of those that cannot run on
            this machine's devices, which the log names. The report names those that stay.
        around: see :func:`patch_flash_attn`.
    Returns:
        A Patch; ``.remove()`` removes our modules and restores what was there before.
    """
    patches: dict[str, Patch] = {}
    refused: dict[str, str] = {}
    for name, functions in STAND_INS.items():
        for put_in in functions if name not in without else ():
            try:
                patches[name] = put_in(replace=replace, around=around)
                break
            except (RuntimeError, ValueError) as error:  # a real one, or ours with other options
                refused.setdefault(name, str(error).partition(";")[0])
    return ImportsPatch(patches, {name: why for name, why in refused.items() if name not in patches})


def patch_imports_if_asked(around: Around | None = None) -> ImportsPatch | None:
    """:func:`patch_imports` if the environment has ``PASCAL_ATTN_FLASH=1``, or ``replace`` for ``replace=True``; None
    if it has not, or has ``PASCAL_ATTN_DISABLE=1``. A real package that stays is named in the log."""
    asked = variables("PASCAL_ATTN_FLASH").get("PASCAL_ATTN_FLASH", "").strip().lower()
    replace = True if asked == "replace" else None
    if switched_on("PASCAL_ATTN_DISABLE") or not (replace or switched_on("PASCAL_ATTN_FLASH")):
        return None
    patch = patch_imports(replace=replace, around=around)
    for why in patch.left_alone.values():
        log.warning("PASCAL_ATTN_FLASH is ignored: %s; PASCAL_ATTN_FLASH=replace takes its place", why)
    return patch
