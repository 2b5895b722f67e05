"""The pages as a site: it builds strictly and without a network, and shows all of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_documents import DOCUMENTS, ROOT

CONFIGURATION = ROOT / "mkdocs.yml"
# Nothing listens there: what asks for a page of the network during the build ends it.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
# What a browser fetches by itself, as opposed to a link that a reader may follow.
FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload)[^>]*href=["']?(?:https?:)?//[^>]+"""
    r"""|@import\s+["'(]|url\(["']?(?:https?:)?//[^)]+"""
)

if importlib.util.find_spec("material") is None:
    pytest.skip("NOT CHECKED: mkdocs-material is not installed", allow_module_level=True)


def build(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "-f", str(configuration), "-d", str(site)],
        env={**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(CONFIGURATION, folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_document_is_a_page_of_the_site(site: Path) -> None:
    missing = []
    for document in DOCUMENTS:
        page = document.relative_to(ROOT).with_suffix(".html")
        name = "index.html" if page.stem == "README" else page.name
        if not (site / page.with_name(name)).is_file():
            missing.append(str(page))
    assert missing == []


def test_pages_and_styles_fetch_nothing_from_other_hosts(site: Path) -> None:
    texts = [path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]
    assert len(texts) > len(DOCUMENTS)
    fetched = {path.name: FETCHED.findall(path.read_text()) for path in texts}
    assert {name: found for name, found in fetched.items() if found} == {}


@pytest.mark.parametrize(
    "text",
    [
        '<link rel="stylesheet" href="https://fonts.example/css?family=Roboto">',
        "<link rel=preconnect href=//fonts.example crossorigin>",
        '<script async src="https://cdn.example/a.js"></script>',
        "@import url('https://cdn.example/a.css')",
        "background: url(//cdn.example/a.png)",
    ],
)
def test_what_a_browser_would_fetch_elsewhere_is_found(text: str) -> None:
    assert len(FETCHED.findall(text)) == 1


def test_the_search_finds_a_term_of_the_glossary(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = [entry["location"] for entry in index["docs"] if "rail" in entry["text"].split()]
    assert any(location.startswith("docs/glossary.html") for location in found)


def test_dead_links_end_the_build_and_are_named(tmp_path: Path) -> None:
    dead = ["none.md", "other.md#nothing", "#nothing", "/other.md", "../outside.md", "none.png"]
    pages = tmp_path / "pages"
    pages.mkdir()
    links = "\n".join(f"[a]({link})" for link in ["other.md#another", *dead])
    (pages / "index.md").write_text(f"# A page\n\n{links}\n")
    (pages / "other.md").write_text("# Another\n")
    configuration = tmp_path / "mkdocs.yml"
    configuration.write_text(
        f"INHERIT: {CONFIGURATION}\ndocs_dir: pages\nnav: [index.md, other.md]\n"
    )

    built = build(configuration, tmp_path / "site")
    assert built.returncode == 1
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    assert [link for link in dead if not any(f"'{link}'" in line for line in warnings)] == []
    assert len(warnings) == len(dead)


def test_a_page_without_a_place_in_the_navigation_ends_the_build(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in ("index.md", "forgotten.md"):
        (pages / name).write_text("# A page\n")
    configuration = tmp_path / "mkdocs.yml"
    configuration.write_text(f"INHERIT: {CONFIGURATION}\ndocs_dir: pages\nnav: [index.md]\n")

    built = build(configuration, tmp_path / "site")
    assert built.returncode == 1
    assert "forgotten.md" in built.stderr
