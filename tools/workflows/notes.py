"""The page of Markdown in each workflow: what to download, what the pack does here, what to expect. Short: it stands
beside the graph and is read at the zoom at which the workflow opens."""

from __future__ import annotations

_REPORT = "After the run, **Pascal Attention Report** says in its first line what was gained, or why nothing was."


def page(title: str, files: list[dict[str, str]], here: str) -> str:
    """Title, downloads, what is special here, the report."""
    rows = [f"- [{f['name']}]({f['url']}) ({f['size']}) into `models/{f['directory']}`" for f in files]
    return "\n\n".join([f"# {title}", "\n".join(rows), here.strip(), _REPORT])


SD15 = """
Every node of the pack in one graph, on a small model.

- **Pascal Attention Patch** is the one that most need: with MODEL, CLIP and VAE it does what **FFN Chunking**, **Text
  Encoder** and **VAE Attention** do one by one.
- **Pascal Memory Estimate**: before the run.
- **Pascal 8-Bit**, bypassed: not exact, fast on old cards.

Bypassed (Ctrl+B), a node leaves the picture bit for bit as it was.
"""

SDXL = """
Where PyTorch has no kernel for it, the scores of the largest attention call take 1,280 MiB here, and 1,024 MiB in the
VAE. With the pack 64 MiB at most, or nothing.

Black picture? The report names the block. If it is the VAE, start ComfyUI with `--fp32-vae`.
"""

FLUX_FP8 = """
The file holds the text encoders as well; the model takes 12 GB of it, and ComfyUI keeps in system memory what does not
fit on the card. No card before RTX 40xx multiplies fp8: each layer is cast.

Scores of one attention call: 1,944 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing.

`precision` in 8 bits (not exact) multiplies integers instead, which GTX 10xx and later can.
"""

Z_IMAGE_INT8 = """
Linear layers in int8 (`int8_tensorwise`): model and text encoder take 6 GB on the card, one after the other. ComfyUI
has no kernel for them below RTX 20xx: there `precision` in 8 bits (not exact) lets this pack multiply them.

Scores of one attention call: 1,920 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing.
"""

Z_IMAGE = """
`fp8_e4m3fn` keeps the model at 6 GB on the card; with 16 GB or more set `default`.

Scores of one attention call: 1,920 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing.
"""

ELEVEN_GB = """
At 1536x1536 the scores of **one** attention call take 9,720 MiB in float32 where they are stored, and 5,184 MiB in the
VAE. With the pack 64 MiB at most, or nothing; what does not fit beside the weights is decoded in bands.

Text encoder (8 GB), model (6 GB), VAE (0.3 GB) follow each other. **Pascal Memory Estimate** tells the need before the
run.
"""

KREA = """
The file is larger than 11 GB: ComfyUI keeps the rest in system memory (24 GB or more) and loads it in every step.

Scores of one attention call: 3,072 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing.
"""

QWEN_GGUF = """
Needs [ComfyUI-GGUF](https://github.com/city96/ComfyUI-GGUF) (ComfyUI Manager: `comfyui-gguf`). For a card with 8 GB
take `qwen-image-Q2_K.gguf` (7.1 GB) of the same place.

Scores of one attention call: 1,536 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing.

`precision` in 8 bits is not exact; the weights stay as the file has them.
"""

WAN = """
`fp8_e4m3fn` keeps the model at 5 GB on the card. 832x480, 49 frames at 24 per second.

Scores of one attention call: 2,353 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing. Out
of memory in the decoder: it goes on in bands by itself. **Pascal Memory Estimate** says whether a longer video fits.
"""

EASY_CACHE = """
**EasyCache** is ComfyUI's own: it leaves out steps in which little changes. It is not exact; bypass it (Ctrl+B) to
compare. The steps that run are as exact as without it.

`fp8_e4m3fn` keeps the model at 5 GB on the card. Scores of one attention call: 2,353 MiB in float32 where they are
stored. With the pack 64 MiB at most, or nothing.
"""

LTX = """
Needs 48 GB of system memory: the file is larger than any of these cards, and ComfyUI loads its layers in every step.

Scores of one attention call: 3,042 MiB in float32 where they are stored. With the pack 64 MiB at most, or nothing. What
the decoder cannot hold is computed in bands, without the seams of tiles.
"""
