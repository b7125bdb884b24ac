"""Every model family of diffusers that has attention, each as its real class at a tiny size with one set of inputs.

Default weights hide attention: gates are zero, scores are all alike, a dropped mask changes nothing. So all weights are
re-initialised at random (:func:`reinitialise`), positions are real grids, and where a model takes a mask it gets real
padding. The families are in ``families.txt``.
"""

from __future__ import annotations

from .family import Draw, Family, NotInThisVersion, reinitialise
from .table import sections

__all__ = ["Draw", "Family", "NotInThisVersion", "families", "reinitialise", "sections"]


WITHOUT_ATTENTION = "autoencoders without attention"  # a section of the table that only tools/vae_table.py reads


def families() -> list[Family]:
    """All families, including those that the installed version of diffusers lacks."""
    return [family for section, those in sections().items() if section != WITHOUT_ATTENTION for family in those]
