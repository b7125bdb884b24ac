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

- **Pascal Attention Patch**: the model's attention. Most need this one alone.
- **Pascal FFN Chunking**: its feed-forward layers in slices.
- **Pascal VAE** and **Text Encoder Attention**: the same for decoding and the prompt.
- **Pascal Tile Size**, **Memory Estimate**: before the run.
- **Pascal 8-Bit**, bypassed: not exact, fast on old cards.

Bypassed (Ctrl+B), a node leaves the picture bit for bit as it was.
"""

SDXL = """
The largest attention call has 4,096 tokens and 20 heads (two prompts). Storing its scores takes 1,280 MiB, and 1,024
MiB more in the VAE. With the pack: 64 MiB at most.

Black picture? The report names the block. If it is the VAE, start ComfyUI with `--fp32-vae`.
"""

Z_IMAGE = """
`fp8_e4m3fn` keeps the model at 6 GB on the card; with 16 GB or more set `default`.

Attention over 4,096 tokens with 30 heads: its scores take 1,920 MiB in float32, and 1,024 MiB in the VAE. With the
pack: 64 MiB at most.
"""

ELEVEN_GB = """
At 1536x1536 the scores of **one** attention call of this model take 9,720 MiB in float32, and 5,184 MiB in the VAE.
With the pack 64 MiB at most. Text encoder (8 GB), model (6 GB) and VAE (0.3 GB) are on the card one by one.

**Pascal Memory Estimate** tells the need before the run. **Pascal 8-Bit**, bypassed, is not exact. Out of memory in the
decoder? Pascal VAE Attention, `decode`: always in bands.
"""

KREA = """
The file is larger than 11 GB: ComfyUI keeps the rest in system memory (24 GB or more) and loads it in every step.

Attention over 4,096 tokens with 48 heads: its scores take 3,072 MiB in float32. With the pack: 64 MiB at most. **Pascal
FFN Chunking** keeps the wide layers small too.
"""

QWEN_GGUF = """
Needs [ComfyUI-GGUF](https://github.com/city96/ComfyUI-GGUF) (ComfyUI Manager: `comfyui-gguf`). For a card with 8 GB
take `qwen-image-Q2_K.gguf` (7.1 GB) of the same place.

Attention over 4,096 tokens with 24 heads: its scores take 1,536 MiB in float32. With the pack: 64 MiB at most, which
leaves the card to the weights. **Pascal 8-Bit**, bypassed: not exact; the weights stay as the file has them.
"""

WAN = """
`fp8_e4m3fn` keeps the model at 5 GB on the card. 832x480, 49 frames at 24 per second.

Attention over 5,070 tokens with 24 heads: its scores take 2,353 MiB in float32. With the pack: 64 MiB at most.
**Pascal Memory Estimate** says before the run whether a longer video fits.

Out of memory in the decoder? VAE Decode (Tiled).
"""

LTX = """
Needs 48 GB of system memory: the file is larger than any of these cards, and ComfyUI loads its layers in every step.

Attention over 4,992 tokens with 32 heads: its scores take 3,042 MiB in float32. With the pack: 64 MiB at most. This
VAE has no attention, so there is no node for it.
"""
