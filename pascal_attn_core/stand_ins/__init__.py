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
from ..patching.patch import Patch, PatchGroup
from ..patching.stand_in import Around
from .sageattention import patch_sageattention
from .xformers import patch_xformers

__all__ = ["patch_imports", "patch_sageattention", "patch_xformers"]

log = logging.getLogger("pascal_attn")

# package -> the functions of which the first that finds no real package puts it in
STAND_INS: dict[str, tuple[Callable[..., Patch], ...]] = {
    "flash_attn": (patch_flash_attn, functools.partial(patch_flash_attn, fa3=None)),
    "sageattention": (patch_sageattention,),
    "xformers": (patch_xformers,),
}


def patch_imports(*, without: Collection[str] = (), replace: bool | None = None, around: Around | None = None) -> Patch:
    """:func:`patch_flash_attn`, :func:`patch_sageattention` and :func:`patch_xformers` at once.

    Args:
        without: the packages that are left alone: "flash_attn", "sageattention", "xformers".
        replace: whether ours take the place of real packages that are installed; None = of those that cannot run on
            this machine's devices, which the log names. The report names those that stay.
        around: see :func:`patch_flash_attn`.
    Returns:
        A Patch; ``.remove()`` removes our modules and restores what was there before.
    """
    taken: list[str] = []
    refused: dict[str, str] = {}
    with PatchGroup("imports") as group:
        for name, functions in STAND_INS.items():
            for put_in in functions if name not in without else ():
                try:
                    group.add(put_in(replace=replace, around=around).remove)
                except (RuntimeError, ValueError) as error:  # a real one, or ours with other options
                    refused.setdefault(name, str(error).partition(";")[0])
                else:
                    taken.append(name)
                    refused.pop(name, None)
                    break
    return group.patch(places=taken, refused=refused)


def patch_imports_if_asked(around: Around | None = None) -> Patch | None:
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
