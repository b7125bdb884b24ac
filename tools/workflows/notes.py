"""The page of Markdown in each workflow: what to download, what the pack does here, what to expect."""

from __future__ import annotations

from typing import Any

_REPORT = """
## Afterwards
**Pascal Attention Report** shows what happened: how each call was computed, the seconds, the memory, and whether the
result was compared with float64. Its text ends with a block for bug reports. Red lines are warnings: read those first.
"""


def _download(files: list[tuple[dict[str, Any], str]]) -> str:
    rows = [f"- [{f['name']}]({f['url']}) ({size}) into `models/{f['directory']}`" for f, size in files]
    return "## Download\n" + "\n".join(rows)


def page(title: str, files: list[tuple[dict[str, Any], str]], here: str) -> str:
    """Title, downloads, what is special here, the report."""
    return "\n\n".join([f"# {title}", _download(files), here.strip(), _REPORT.strip()])


SDXL = """
## What the pack does here
The largest attention calls of this picture have 4,096 tokens, 10 heads and two prompts. A method that stores all their
scores needs 1,280 MiB for one call, and the VAE 1,024 MiB at the end. Pascal Attention never stores them: 64 MiB at
most per call.

## On a GTX 1080 Ti
PyTorch has a memory-saving kernel for most of these calls, and `auto` uses it wherever nothing faster is there. So
expect the same picture, and less memory where ComfyUI would have fallen back to another method. Speed on this card:
not measured yet.

Black picture? The NaN guard is on in both nodes; the report names the block. If it is the VAE, start ComfyUI with
`--fp32-vae`.
"""

FLUX = """
## What the pack does here
Flux computes attention over 4,352 tokens (4,096 of the picture, 256 of the prompt) with 24 heads, 57 times per step.
A method that stores all scores needs 1,734 MiB for one call (float32); Pascal Attention 64 MiB at most.

**Pascal FFN Chunking** runs the wide layers of the double blocks over some tokens at a time. The single blocks join
attention and wide layer in one matrix and cannot be chunked; the node says so.

## On a GTX 1080 Ti
The file is larger than the card: ComfyUI keeps part of it in system memory (32 GB is a good amount) and that costs the
most time. Schnell needs only 4 steps and no negative prompt (cfg 1). Speed on this card: not measured yet.
"""

WAN = """
## What the pack does here
33 frames of 832x480 are 14,040 tokens. With 12 heads a method that stores all scores needs 9,024 MiB for one call
(float32), nearly the whole card; Pascal Attention 64 MiB at most.

**Pascal FFN Chunking** runs the feed-forward layers over some tokens at a time: their wide tensors, 480 MiB each
(float32), never exist as a whole.

**Pascal Memory Estimate** says before the run whether the model's largest steps will fit. Raise `length` (in steps
of 4) and look at it again before waiting for a longer video.

## On a GTX 1080 Ti
Speed: not measured yet. If decoding runs out of memory, put VAE Decode (Tiled) in the place of VAE Decode; the patched
VAE works there too.
"""

LTXV = """
## What the pack does here
97 frames of 768x512 are 4,992 tokens. With 32 heads a method that stores all scores needs 3,042 MiB for one call
(float32); Pascal Attention 64 MiB at most. The prompt comes with a mask: masks are kept exactly.

**Pascal FFN Chunking** runs the feed-forward layers over some tokens at a time. **Pascal Memory Estimate** says before
the run what both need. The VAE of this model has no attention, so there is no node for it here.

## On a GTX 1080 Ti
The model wants long prompts that describe the motion. Width and height are multiples of 32, length is 8n + 1.
Speed on this card: not measured yet.
"""

EVERY_NODE = """
## Every node of the pack
- **Pascal Tile Size** reads the card's L2 cache and gives a tile size with its reason. It is linked to the patch.
- **Pascal Attention Patch**: the model's attention. The node that most people need.
- **Pascal FFN Chunking**: the model's feed-forward layers, some tokens at a time.
- **Pascal VAE Attention**, **Pascal Text Encoder Attention**: the same for decoding and for the prompt.
- **Pascal Memory Estimate**: before the run, what it will need.
- **Pascal Attention Report**: after the run, what happened.

Every node can be bypassed (Ctrl+B): the result is then bit for bit what it was without it. Start with Pascal Attention
Patch alone and add what the report asks for.

The picture is 768x768, so that the run is quick on an old card.
"""
