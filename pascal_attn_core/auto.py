"""Import this module, and ``PASCAL_ATTN_ENABLE=1`` in the environment turns the process-wide switch on.

    PASCAL_ATTN_ENABLE=1 python -c "import pascal_attn_core.auto, runpy; runpy.run_path('generate.py')"

Without that variable, or with ``PASCAL_ATTN_DISABLE=1``, the import changes nothing, so that a program may always have
it. It is the one module of this package whose import does something: see :mod:`pascal_attn_core.sdpa_patch`.
"""

from .sdpa_patch import enable_if_asked

enable_if_asked()
