"""A workflow as we write it down: nodes by name, where they stand, and what is set on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

NARROW, PATCH, WIDE = 270, 290, 640  # columns


def width_for(file: str) -> int:
    """Return the width of a node whose widget names this file, so that the front end shows the name whole."""
    return max(NARROW, 98 + round(6.4 * len(file)))


@dataclass(frozen=True)
class Out:
    """An output of a node."""

    key: str
    slot: int = 0


@dataclass
class Sheet:
    """One workflow.

    Attributes:
        name: of its files, and what the template browser shows.
        nodes: what ``draw.js`` builds, in order.
        stacks: left to right; each holds groups, top to bottom; each of those columns of nodes.
        files: what it loads, in the order of their nodes.
    """

    name: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[list[dict[str, Any]]] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)

    def add(
        self,
        key: str,
        kind: str,
        *,
        title: str = "",
        size: tuple[int, int] = (NARROW, 0),
        models: tuple[dict[str, str], ...] = (),
        pack: str = "",
        bypassed: bool = False,
        **inputs: Any,
    ) -> Out:
        """A node of class ``kind``: an ``Out`` among the inputs is a link, anything else a widget's value.

        Args:
            size: the least width and height.
            models: files that ComfyUI offers to download when they are missing.
            pack: of another author that has this node, by its name in ComfyUI's registry; "" = ComfyUI itself or ours.
            bypassed: whether it stands there for the user to switch on.
        """
        links = {name: [value.key, value.slot] for name, value in inputs.items() if isinstance(value, Out)}
        widgets = {name: value for name, value in inputs.items() if not isinstance(value, Out)}
        known = [{name: file[name] for name in ("name", "url", "directory")} for file in models]
        self.files += [file for file in models if file not in self.files]
        node = {"key": key, "type": kind, "title": title, "size": list(size), "pack": pack, "bypassed": bypassed}
        self.nodes.append({**node, "links": links, "widgets": widgets, "models": known})
        return Out(key)

    def group(self, title: str, colour: str, *columns: list[str], below: bool = False) -> None:
        """Frame nodes, column by column, to the right of the groups so far or below the last; no title, no frame."""
        group = {"title": title, "colour": colour, "columns": list(columns)}
        if below:
            self.stacks[-1].append(group)
        else:
            self.stacks.append([group])


def model_file(repository: str, path: str, size: str, folder: str = "") -> dict[str, str]:
    """A public file as the front end wants to know it, with its size as people read it, ``"6.9 GB"``.

    Args:
        folder: of ComfyUI's models; "" = called as that in which the file lies there.
    """
    url = f"https://huggingface.co/{repository}/resolve/main/{path}"
    place = PurePosixPath(path)
    return {"name": place.name, "url": url, "directory": folder or place.parent.name, "size": size}
