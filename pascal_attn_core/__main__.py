"""``python -m pascal_attn_core``: the same as the command ``pascal-attn``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
