"""Prompts in API format for the tiny models, and what a run of one gave."""

import re
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from attn_support.comfy.server import ComfyServer, WorkflowError
from torch import Tensor

Link = list[Any]  # [node id, output number]
Patch = tuple[str, dict[str, Any]]  # a MODEL -> MODEL node: class_type and its inputs besides ``model``

RUN_LINE = re.compile(
    r"pascal_attn: (?P<subject>[\w ]+): (?P<calls>\d+) calls?, (?P<taken>\d+) taken"
    r"(?: \((?P<routes>[^)]*)\))?, (?P<passed>\d+) passed to ComfyUI"
)


@dataclass(frozen=True)
class Family:
    """This class holds the conditioning and the latent that a tiny diffusion model needs around it."""

    tokens: int
    dim: int
    latent: Patch  # the node that makes the empty latent
    pooled: int = 0
    mask: bool = False
    cfg: float = 3.0  # 1 = no negative prompt
    model: str = ""  # where it is not the family's own name
    since: tuple[int, ...] = ()  # the first version of ComfyUI that runs it without us


def _image(class_type: str) -> Patch:
    return class_type, {"width": 128, "height": 128, "batch_size": 1}


def _video(class_type: str, length: int) -> Patch:
    return class_type, {"width": 128, "height": 128, "length": length, "batch_size": 1}


FAMILIES = {
    "sd15": Family(77, 768, _image("EmptyLatentImage")),
    "sdxl": Family(77, 2048, _image("EmptyLatentImage"), pooled=1280),
    "sd3": Family(16, 4096, _image("EmptySD3LatentImage"), pooled=2048),
    "flux": Family(16, 4096, _image("EmptySD3LatentImage"), pooled=768, cfg=1.0),
    "wan_t2v": Family(16, 4096, _video("EmptyHunyuanLatentVideo", 9)),
    "wan_i2v": Family(16, 4096, _video("EmptyHunyuanLatentVideo", 5)),
    "ltxv": Family(16, 64, _video("EmptyLTXVLatentVideo", 9), mask=True),
    # With a mask and guidance the host itself fails in this model.
    "hunyuan_video": Family(16, 128, _video("EmptyHunyuanLatentVideo", 9), pooled=768, mask=True, cfg=1.0),
    "lumina2": Family(16, 64, _image("EmptySD3LatentImage")),
    # ComfyUI 0.8.0 gives the encoder's integer mask to SDPA, which refuses it.
    "lumina2_masked": Family(16, 64, _image("EmptySD3LatentImage"), mask=True, model="lumina2", since=(0, 9)),
    "qwen_image": Family(16, 3584, _image("EmptySD3LatentImage")),
    "krea2": Family(16, 320, _image("EmptySD3LatentImage")),
    "minimax_h3": Family(16, 64, ("EmptyMiniMaxH3LatentAV", {"width": 256, "height": 256, "length": 22}), cfg=1.0),
}


class Graph:
    """A prompt under construction: ``add`` returns the link to the new node's first output."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict[str, Any]] = {}

    def add(self, class_type: str, *, output: int = 0, **inputs: Any) -> Link:
        node_id = str(max(map(int, self.prompt), default=0) + 1)
        self.prompt[node_id] = {"class_type": class_type, "inputs": inputs}
        return [node_id, output]

    def patched(self, model: Link, patches: Iterable[Patch]) -> Link:
        """``model`` through MODEL -> MODEL nodes, first to last."""
        for class_type, inputs in patches:
            model = self.add(class_type, model=model, **inputs)
        return model

    def load(self, name: str) -> Link:
        """The tiny diffusion model ``name``."""
        return self.add("UNETLoader", unet_name=f"tiny_{name}.safetensors", weight_dtype="default")

    def sample(self, model: Link, family: Family, *, seed: int = 0, steps: int = 2, cfg: float | None = None) -> Link:
        """A sampler run that the host's cache never skips; a LATENT."""
        settings = {"tokens": family.tokens, "dim": family.dim, "pooled": family.pooled, "mask": family.mask}
        class_type, inputs = family.latent
        links = {"model": model, "latent_image": self.add("ProbeFresh", value=self.add(class_type, **inputs))}
        links |= {name: self.add("ProbeCond", **settings, seed=n) for n, name in ((1, "positive"), (2, "negative"))}
        sampling = {"cfg": family.cfg if cfg is None else cfg, "sampler_name": "euler", "scheduler": "simple"}
        return self.add("KSampler", **links, **sampling, seed=seed, steps=steps, denoise=1.0)


@dataclass(frozen=True)
class PatchRun:
    """One line of the pack's log: the attention calls of one run."""

    subject: str
    calls: int
    taken: int
    passed: int
    routes: dict[str, int]


@dataclass(frozen=True)
class Captured:
    """This class holds what one run gave, and what the server logged meanwhile."""

    tensors: list[Tensor] = field(repr=False)  # the latents of video and sound are two
    text: str  # a captured STRING
    counts: Counter[str]  # of the probe pack: wrapped, sdpa and other
    log: list[str]
    runs: list[PatchRun]

    @property
    def run(self) -> PatchRun:
        """The only run of the pack."""
        assert len(self.runs) == 1, "\n".join(self.log)
        return self.runs[0]

    def says(self, text: str) -> bool:
        """Whether a line of the log holds ``text``."""
        return any(text in line for line in self.log)


def patch_runs(log: Iterable[str]) -> list[PatchRun]:
    """The pack's summaries in a log, in order."""
    found = []
    for match in filter(None, map(RUN_LINE.search, log)):
        routes = dict(part.rsplit(" ", 1) for part in (match["routes"] or "").split(", ") if part)
        numbers = (int(match[name]) for name in ("calls", "taken", "passed"))
        found.append(PatchRun(match["subject"], *numbers, {name: int(n) for name, n in routes.items()}))
    return found


def capture(server: ComfyServer, graph: Graph, *values: Link, tag: str = "", timeout_s: float = 300) -> list[Captured]:
    """Run the graph to its end and return each value in ``values``; ``WorkflowError`` if it fails."""
    name = uuid.uuid4().hex
    paths = [server.base / f"{name}-{i}.pt" for i in range(len(values))]
    for i, (value, path) in enumerate(zip(values, paths)):
        graph.add("ProbeCapture", value=value, path=str(path), tag=tag if i == 0 else "")
    outcome = server.run(graph.prompt, timeout_s)
    if outcome.status != "success":
        raise WorkflowError(f"{outcome.status}: {outcome.message}", outcome)
    saved, runs = [torch.load(path, weights_only=True) for path in paths], patch_runs(outcome.log)
    return [Captured(each["tensors"], each["text"], Counter(each["counts"]), outcome.log, runs) for each in saved]


def sample_graph(name: str, patches: Iterable[Patch], tag: str, **options: Any) -> tuple[Graph, Link]:
    """Load a tiny model, patch it, count around it, sample: the graph and its LATENT."""
    graph = Graph()
    model = graph.patched(graph.load(FAMILIES[name].model or name), [*patches, ("ProbeCount", {"tag": tag})])
    return graph, graph.sample(model, FAMILIES[name], **options)


def sample(server: ComfyServer, name: str, *patches: Patch, **options: Any) -> Captured:
    """Sample the tiny model ``name`` through ``patches`` (first to last); options go to ``Graph.sample``."""
    tag = uuid.uuid4().hex
    graph, latent = sample_graph(name, patches, tag, **options)
    return capture(server, graph, latent, tag=tag)[0]


def attention_patch(**inputs: Any) -> Patch:
    """Our node with every call taken, other inputs at their defaults."""
    defaults = {"route": "auto", "budget_mib": 0, "tile_size": 0, "coverage": "attention override", "nan_guard": True}
    return "PascalAttentionPatch", {**defaults, "min_keys": 0, **inputs}


CHUNKING: Patch = ("PascalFFNChunking", {"budget_mib": 1, "min_tokens": 2})
_ATTENTION = {"attention": "off", "attention_max_error": 0.02, "linear_layers": True}
_LINEAR = {"max_error": 0.05, "include": "", "exclude": "", "weights": "host", "int8_files": "auto"}
INT8: Patch = ("Pascal8Bit", _ATTENTION | _LINEAR)


def largest_difference(ours: Captured, stock: Captured) -> float:
    """Largest difference, in parts of the stock result's largest value. Raises if the results are not comparable."""
    assert len(ours.tensors) == len(stock.tensors) > 0
    worst = 0.0
    for a, b in zip(ours.tensors, stock.tensors):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert torch.isfinite(b).all()
        size = b.abs().max().item()
        worst = max(worst, (a - b).abs().max().item() / (size or 1.0))
    return worst
