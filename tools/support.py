"""Makes what the tests share importable, as ``attn_support``."""

import sys
import types
from pathlib import Path

_support = types.ModuleType("attn_support")
_support.__path__ = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]
sys.modules.setdefault("attn_support", _support)
