"""Importing this module applies what the environment asks for: ``PASCAL_ATTN_ENABLE=1`` turns the process-wide switch
on, ``PASCAL_ATTN_FLASH=1`` makes ``import flash_attn``, ``sageattention`` and ``xformers`` find our functions where the
real package is not installed.

    PASCAL_ATTN_ENABLE=1 python -c "import pascal_attn_core.auto, runpy; runpy.run_path('generate.py')"

Without these variables, or with ``PASCAL_ATTN_DISABLE=1``, the import changes nothing, so a program may always contain
it. See :mod:`pascal_attn_core.sdpa_patch`, and ``pascal-attn run`` for programs that do not import it. Besides this
module only :mod:`pascal_attn_core.diffusers` has an effect when it is imported: methods of diffusers' classes.
"""

from .sdpa_patch import enable_if_asked
from .stand_ins import patch_imports_if_asked

enable_if_asked()
patch_imports_if_asked()
