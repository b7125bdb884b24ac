"""Import this module, and the environment says what happens: ``PASCAL_ATTN_ENABLE=1`` turns the process-wide switch on,
``PASCAL_ATTN_FLASH=1`` makes ``import flash_attn`` find ours where the real package is not installed.

    PASCAL_ATTN_ENABLE=1 python -c "import pascal_attn_core.auto, runpy; runpy.run_path('generate.py')"

Without these variables, or with ``PASCAL_ATTN_DISABLE=1``, the import changes nothing, so that a program may always
have it. It is the one module of this package whose import does something: see :mod:`pascal_attn_core.sdpa_patch`, and
``pascal-attn run`` for programs that do not import it.
"""

from .flash_attn.install import install_if_asked
from .sdpa_patch import enable_if_asked

enable_if_asked()
install_if_asked()
