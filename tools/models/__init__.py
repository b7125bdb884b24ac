"""The speed that machine code can reach on a card that is not here: counted, or played back on a model of its
scheduler."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # attn_support, the interpreter of AMD's machine code
