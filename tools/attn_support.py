"""The helpers of the tests, under the name by which the tests import them."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]
