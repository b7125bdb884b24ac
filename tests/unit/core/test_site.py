"""The docs site's pages: every public name is in the reference, every page in the navigation, every link at home."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from attn_support.markdown import ROOT

from tools.site import API, BESIDE, api_pages, at_home, public_names, sources


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


def test_hosts_that_may_be_missing_are_read_without_being_imported() -> None:
    assert public_names("diffusers")["PascalAttnProcessor"] == "pascal_attn_core.diffusers.PascalAttnProcessor"
    assert public_names("transformers")["pascal_mask"] == "pascal_attn_core.transformers.mask.pascal_mask"


def test_no_name_has_two_places_in_the_reference() -> None:
    shown = re.findall(r"^::: (\S+)$", "\n".join(api_pages().values()), re.MULTILINE)
    assert len(shown) == len(set(shown))


def test_links_of_the_repository_become_links_of_the_site() -> None:
    readme = '[a](docs/design.md#tests) [![b](docs/icon.svg)](LICENSE) [c](Makefile) <img src="docs/report.png">'
    site = '[a](design.md#tests) [![b](icon.svg)](LICENSE.txt) c <img src="report.png">'
    assert at_home(readme, "README.md") == site
    assert at_home("[a](../README.md) [b](#c)", "docs/design.md") == "[a](index.md) [b](#c)"
    assert at_home("```\n[a](../README.md)\n```", "docs/design.md") == "```\n[a](../README.md)\n```"
    help_page = next(path for path in sources() if path.startswith("nodes/"))
    assert at_home("[a](../../../CHANGELOG.md)", help_page) == "[a](../changelog.md)"


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    pages += [page for page in BESIDE.values() if page.endswith(".md")]
    assert [page for page in pages if not re.search(rf"^ +- (Start: )?{re.escape(page)}$", listed, re.MULTILINE)] == []
    assert all((ROOT / source).exists() for source in sources())
