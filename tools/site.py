"""Tells mkdocs of the docs site what is not in docs/: pages made of files elsewhere, the API reference, and links.

mkdocs calls the functions whose names begin with ``on_`` (mkdocs.yml, ``hooks``). Links in the Markdown files are those
of the repository; here they become those of the site, and a link to a file that is no page becomes its text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Files of the repository, and where they are in the site.
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE.txt",
    "tools/iframe-worker.js": "iframe-worker.js",
    "notebooks/attention.ipynb": "notebooks/attention.ipynb",
    "notebooks/cards.ipynb": "notebooks/cards.ipynb",
}
# Modules whose public names make a page each.
API = ("", "attention_map", "diffusers", "ffn", "flash_attn", "int8", "layers", "observe.memory",
       "observe.progress", "plots", "sdpa_patch", "stand_ins", "transformers", "vae")  # fmt: skip
_LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\(([^)\s]+)\)")  # its text may be a picture
_SOURCE = re.compile(r'(src|href)="([^"]+)"')
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):(?=<code>)")


def sources() -> dict[str, str]:
    """Path in the repository -> path in the site, of every file that is not in docs/."""
    help_pages = sorted((ROOT / "nodes" / "web" / "docs").glob("*.md"))
    return {**BESIDE, **{f"nodes/web/docs/{page.name}": f"nodes/{page.name}" for page in help_pages}}


def public_names(module: str) -> dict[str, str]:
    """Public names of a module of the package ("" = the package) and where each is defined, read from the source:
    ``{"sdpa": "pascal_attn_core.attention.sdpa"}``, those under ``if TYPE_CHECKING`` too. Without ``__all__``, its
    public functions and classes."""
    dotted = ".".join(filter(None, ["pascal_attn_core", module]))
    path = ROOT / dotted.replace(".", "/")
    is_package = path.is_dir()
    tree = ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text(encoding="utf-8"))
    here = dotted if is_package else dotted.rpartition(".")[0]
    imported, defined, assigned, exported = {}, {}, {}, None
    for node in (inner for outer in tree.body for inner in (outer.body if isinstance(outer, ast.If) else [outer])):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*here.split(".")[: len(here.split(".")) + 1 - node.level], *filter(None, [node.module])])
            imported.update({alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names})
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = f"{dotted}.{node.name}"
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            exported = [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = f"{dotted}.{node.targets[0].id}"
    if exported is None:
        exported = [name for name in defined if not name.startswith("_")]
    return {name: {**imported, **defined, **assigned}[name] for name in exported}


def api_pages() -> dict[str, str]:
    """Path in the site -> Markdown of a module's page: its docstring, then each public name. What several modules offer
    is on the page of the first."""
    pages: dict[str, str] = {}
    shown: set[str] = set()
    for module in API:
        names = {name: where for name, where in public_names(module).items() if where not in shown}
        shown |= set(names.values())
        dotted = ".".join(filter(None, ["pascal_attn_core", module]))
        parts = [f"# {dotted}", f"::: {dotted}\n    options: {{members: false, show_root_heading: false}}"]
        parts += [f"::: {where}\n    options: {{heading: {name}, toc_label: {name}}}" for name, where in names.items()]
        pages[f"api/{module or 'pascal_attn_core'}.md"] = "\n\n".join(parts) + "\n"
    return pages


def at_home(markdown: str, source: str) -> str:
    """The text of a file of the repository with the links of the site.

    Args:
        source: the file's path in the repository.
    """
    there = sources()
    home = _in_site(source, there)

    def moved(link: str) -> str | None:
        if "://" in link or link.startswith(("#", "mailto:")):
            return link
        path, mark, anchor = link.partition("#")
        target = _in_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), there)
        relative = target and posixpath.relpath(target, posixpath.dirname(home or "") or ".")
        return relative and relative + mark + anchor

    def link(found: re.Match[str]) -> str:
        target, text = moved(found[3]), _LINK.sub(link, found[2])
        return text if target is None else f"{found[1]}[{text}]({target})"

    def attribute(found: re.Match[str]) -> str:
        return f'{found[1]}="{moved(found[2]) or found[2]}"'

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _SOURCE.sub(attribute, _LINK.sub(link, part)) for part in parts)


def _in_site(path: str, there: dict[str, str]) -> str | None:
    return there.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


# ---- what mkdocs calls -----------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """The pages that are not in docs/ take their places in the navigation."""
    pages = {
        "NODES": sorted(path for path in sources().values() if path.startswith("nodes/")),
        "API": list(api_pages()),
    }
    config.nav = [{name: pages.get(entry, entry) if isinstance(entry, str) else entry for name, entry in part.items()}
                  for part in config.nav]  # fmt: skip
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files that lie elsewhere, and the reference."""
    from mkdocs.structure.files import File

    for source, path in sources().items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """The links of one page."""
    path = page.file.src_uri
    back = {site: source for source, site in sources().items()}
    return markdown if path.startswith("api/") else at_home(markdown, back.get(path, f"docs/{path}"))


def on_page_content(html: str, **others: Any) -> str:
    """Docstrings name objects as Sphinx does, ``:func:`sdpa```; here the name alone is left."""
    return _ROLE.sub("", html)
