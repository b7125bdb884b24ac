"""Who may import whom: read from every module of the core and of the nodes, imports inside functions included."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOPS = ("pascal_attn_core", "nodes")
SPLIT = ("fused", "nodes")  # folders whose own folders are rooms
# From the ground up; a room (a folder, or a module of the core that is in none) may import what stands on a floor below
# its own, and itself.
FLOORS: list[set[str]] = [
    {"version", "config", "reference"},
    {"machine", "call"},
    {"observe", "patching"},
    {"tiled", "ffn"},
    {"fused/geometry", "plots"},
    {"fused/code"},
    {"fused/gpu", "fused/launch"},
    {"fused/trust"},
    {"fused"},
    {"contest"},
    {"routes"},
    {"attention", "gguf"},
    {"flex", "sdpa_patch", "compat", "attention_map", "flash_attn", "vae", "int8"},
    {"diffusers", "transformers", "selftest", "layers", "stand_ins"},
    {"auto", ""},
    {"nodes/comfy"},
    {"nodes/engine"},
    {"nodes/reporting"},
    {"nodes/estimate"},
    {"nodes/patches"},
    {"cli", "nodes"},
    {"__main__"},
]
# Who may name what is installed beside us; what is not here is the standard library's, torch, or plain Python.
HOSTS: dict[str, set[str]] = {
    "diffusers": {"diffusers", "cli"},
    "transformers": {"transformers", "cli"},
    **{
        name: {"nodes"}
        for name in ("comfy", "comfy_execution", "comfy_kitchen", "comfyui_version", "folder_paths", "server")
    },
    "PIL": {"nodes", "cli"},
    "numpy": {"nodes", "cli"},
    "matplotlib": {"plots", "cli"},
    **{name: set() for name in ("triton", "accelerate", "peft", "xformers", "flash_attn", "gguf", "safetensors")},
}
FILES = sorted(path.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py"))


def room_of(module: tuple[str, ...]) -> str:
    """The room of a module, given by its dotted name's parts: "" = the package's own ``__init__``."""
    parts = module[module[0] == "pascal_attn_core" :]
    folder = parts if (ROOT / Path(*module)).is_dir() else parts[:-1]
    return "/".join(folder[:2] if folder and folder[0] in SPLIT else parts[:1])


def module_of(file: Path) -> tuple[str, ...]:
    parts = file.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@functools.cache
def imports_of(file: Path, text: str) -> tuple[tuple[str, ...], ...]:
    """Every module that a file imports anywhere in its code; within the package down to the module, not its names."""
    return tuple(_imports(file, text))


def _imports(file: Path, text: str) -> Iterator[tuple[str, ...]]:
    package = file.with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(part for part in (node.module or "").split(".") if part)
            for alias in node.names:
                path = ROOT / Path(*base, alias.name)
                yield (*base, alias.name) if path.is_dir() or path.with_suffix(".py").exists() else base


def complaints(file: Path, text: str) -> list[str]:
    """Return what the imports of one file break."""
    room, found = room_of(module_of(file)), []
    floor = next((i for i, rooms in enumerate(FLOORS) if room in rooms), None)
    if floor is None:
        return [f"{file}: no floor has the room {room!r}"]
    below = set().union(*FLOORS[:floor], {room})
    for target in imports_of(file, text):
        if target[0] in TOPS:
            if room_of(target) not in below:
                found.append(f"{file} imports {'.'.join(target)}, which is not below it")
        elif (area := room.partition("/")[0]) not in HOSTS.get(target[0], {area}):
            found.append(f"{file} names the host {target[0]}")
    return found


def test_imports_lead_downwards() -> None:
    assert [each for file in FILES for each in complaints(file, (ROOT / file).read_text(encoding="utf-8"))] == []


def test_no_circle() -> None:
    arrows = {
        module_of(file): {
            target
            for target in imports_of(file, (ROOT / file).read_text(encoding="utf-8"))
            if target[0] in TOPS and target != module_of(file)
        }
        for file in FILES
    }
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle
