"""This module has what the repository's Markdown files hold: links, headings, fenced blocks."""

import functools
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:img|a)\s[^>]*?(?:src|href)=\"([^\"]+)\"")


class Block(NamedTuple):
    """A fenced block: its language, "" for none, and its text."""

    language: str
    text: str


@functools.cache
def pages() -> tuple[Path, ...]:
    """Every Markdown file that belongs to the repository: those that git tracks or would, all of them without git."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True, text=True, check=False,
    ).stdout.split("\n")  # fmt: skip
    found = {ROOT / name for name in listed if name} or set(ROOT.rglob("*.md"))
    return tuple(sorted(page for page in found if page.is_file() and ".venv" not in page.parts))


def documents() -> tuple[Path, ...]:
    """README and the pages of docs/: what a reader takes commands and snippets from."""
    return (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages, in order; without any, all of them."""
    found = [Block(*match) for match in _FENCE.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    """The text of a page without fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    """Return what stands between backticks outside fenced blocks."""
    return [code.strip("`") for code in _CODE.findall(prose(page))]


def links(page: Path) -> list[str]:
    """The targets of all links and pictures of a page."""
    return [first or second for first, second in _LINK.findall(_CODE.sub("", prose(page)))]


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page can be linked to, as the sites that show Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}


def table_rows(page: Path) -> list[list[str]]:
    """The cells of every table row of a page, without headers' underlines."""
    rows = re.findall(r"^\|(.*)\|$", prose(page), re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    return [row for row in cells if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
