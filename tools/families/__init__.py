"""Every model family of diffusers that has attention, each as its real class at a tiny size with one set of inputs.

Default weights hide attention: gates are zero, scores are all alike, a dropped mask changes nothing. So all weights are
re-initialised at random (:func:`reinitialise`), positions are real grids, and where a model takes a mask it gets real
padding.
"""

from __future__ import annotations

from .family import Draw, Family, NotInThisVersion, reinitialise

__all__ = ["Draw", "Family", "NotInThisVersion", "families", "reinitialise"]


def families() -> list[Family]:
    """All families, including those that the installed version of diffusers lacks."""
    from . import (
        audio,
        autoencoders,
        controlnets,
        image,
        image_single,
        image_streams,
        parts,
        unets,
        video,
        video_more,
        video_wan,
    )

    images, videos = (image, image_single, image_streams), (video, video_more, video_wan)
    modules = (unets, *images, *videos, audio, controlnets, autoencoders, parts)
    return [family for module in modules for family in module.FAMILIES]
