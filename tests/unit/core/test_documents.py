"""Documents and the site made of them: links lead somewhere, commands exist, every public name is in the reference."""

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attn_support.markdown import ROOT, anchors, blocks, documents, inline_code, links, pages

from pascal_attn_core.cli import COMMANDS, _parser
from tools.site import API, BESIDE, api_pages, public_names, sources

# Commands of the documents that no test runs, each with the reason.
NOT_RUN = {
    "git clone": "needs the address of the repository",
    "pip install": "installs something",
    "pip download": "downloads something",
    ".venv\\Scripts\\pip install": "installs something",
    "py -m venv": "Windows",
    ".venv\\Scripts\\pascal-attn": "Windows; `pascal-attn` is tested by tests/unit/cli",
    ".venv\\Scripts\\python -m pytest": "Windows; it is this very test run",
    "cd": "a folder of the reader",
    "ruff": "part of `make check`",
    "mypy": "part of `make check`",
    "OMP_NUM_THREADS=1 python -m pytest": "it is this very test run",
}


def _commands(page: Path) -> Iterator[str]:
    """The lines of the console blocks of a page, without comments, and the inline code that is a command of ours."""
    for block in blocks(page, "console"):
        for line in block.text.splitlines():
            yield from (part.strip() for part in line.partition("  #")[0].split("&&"))
    for code in inline_code(page):
        if re.match(r"(pascal-attn|python|make) ", code) and "..." not in code:
            yield code


def _parses(command: str) -> bool:
    """Whether our command line knows the command and all its options; FILE and the like stand for values."""
    arguments = shlex.split(command)[1:]
    if arguments == ["--version"]:
        return True
    try:
        _parser(arguments[0]).parse_args(arguments)
    except (SystemExit, argparse.ArgumentError):
        return False
    return True


def _problem(command: str) -> str:
    """ "" if the command exists as the repository stands."""
    words = shlex.split(command, posix="\\" not in command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if any(command.startswith(known) for known in NOT_RUN):
        return ""
    if words[0] == "pascal-attn":
        exists = words[1] in {*COMMANDS, "--version"} and _parses(shlex.join(words))
        return "" if exists else "no such command or option"
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return "" if words[1] in targets else "no such target of the Makefile"
    if words[0] == "python":
        return _python_problem(words[1:])
    return "neither ours, nor in NOT_RUN"


def _python_problem(words: list[str]) -> str:
    if words[0] == "-m" and words[1] == "pascal_attn_core":
        return "" if len(words) == 2 or _parses(shlex.join(words[1:])) else "no such command or option"
    if words[0] == "-m" and words[1] != "pytest":
        path = ROOT / words[1].replace(".", "/")
        return "" if path.with_suffix(".py").exists() or (path / "__main__.py").exists() else "no such module"
    files = [word for word in words if word.startswith(("tests/", "tools/"))]
    missing = [file for file in files if not (ROOT / file.partition("::")[0]).exists()]
    return f"{missing} do not exist" if missing else ""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_or_heading_that_exists(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        known = target.exists() and target.is_relative_to(ROOT)
        if not known or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [*documents(), ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_command_of_a_document_exists(page: Path) -> None:
    problems = {command: problem for command in _commands(page) if (problem := _problem(command))}
    assert problems == {}


def test_the_readme_is_short_and_leads_to_every_document() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 150
    named = {(ROOT / link.partition("#")[0]).resolve() for link in links(readme) if "://" not in link}
    assert [page.name for page in documents() if page not in named and page != readme] == []


@pytest.mark.parametrize("module", [name for name in API if name not in ("diffusers", "transformers")])
def test_the_reference_names_what_a_module_offers_and_where_it_is_defined(module: str) -> None:
    path = ".".join(filter(None, ["pascal_attn_core", module]))
    importlib.import_module(path)
    offered = sys.modules[path]
    for name, where in public_names(module).items():
        defined_in, _, last = where.rpartition(".")
        importlib.import_module(defined_in)
        assert getattr(sys.modules[defined_in], last) is getattr(offered, name)
    if exported := getattr(offered, "__all__", None):
        assert set(public_names(module)) == {name for name in exported if not name.startswith("_")}


def test_hosts_are_read_without_being_imported_and_no_name_has_two_places_in_the_reference() -> None:
    assert public_names("diffusers")["PascalAttnProcessor"] == "pascal_attn_core.diffusers.PascalAttnProcessor"
    assert public_names("transformers")["pascal_mask"] == "pascal_attn_core.transformers.mask.pascal_mask"
    shown = re.findall(r"^::: (\S+)$", "\n".join(api_pages().values()), re.MULTILINE)
    assert len(shown) == len(set(shown))


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    pages += [page for page in BESIDE.values() if page.endswith(".md")]
    assert [page for page in pages if not re.search(rf"^ +- (Start: )?{re.escape(page)}$", listed, re.MULTILINE)] == []
    assert all((ROOT / source).exists() for source in sources())
