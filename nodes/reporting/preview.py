"""The picture as ComfyUI wants it: as an IMAGE, and as a file that the front end shows on the node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image


def as_image(picture: Image.Image) -> Tensor:
    """``[1, height, width, 3]``, float32 from 0 to 1."""
    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)[None]


def save_preview(picture: Image.Image) -> dict[str, str] | None:
    """Write it to ComfyUI's folder of temporary files, as its preview node does; what the front end asks for. None
    where there is no such folder."""
    try:
        import folder_paths
    except ImportError:
        return None
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        "pascal_attention_report", folder_paths.get_temp_directory(), picture.width, picture.height
    )
    file = f"{name}_{counter:05}_.png"
    picture.save(os.path.join(folder, file), compress_level=4)
    return {"filename": file, "subfolder": subfolder, "type": "temp"}
