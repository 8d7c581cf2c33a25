"""The documents name files, modules, functions and tests that exist."""

import pkgutil
import re
from inspect import isfunction
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")),
    *(Path(name) for name in ("README.md", "CONTRIBUTING.md")),
]
TOP = "app|bench|migrations|pipeline|proto|recon|sdstore|tests|tools"
MADE_LATER = ("bench/results/", "app/store/migrations/", "sdstore/wire/proto/")
"""The bench writes the first; a wheel contains the others."""

FILE = re.compile(rf"`((?:{TOP}|docs)/[\w./-]*)(?:::?([\w.]+))?`")
NAME = re.compile(rf"`((?:{TOP})(?:\.\w+)+)(?:\(\))?`")
FILE_NAMES = re.compile(r"\.(?:png|csv|damaged|loading)$")
"""Endings of files that look like names of modules."""


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_names_what_exists(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for file, name in FILE.findall(text):
        if file.startswith(MADE_LATER):
            continue
        path = ROOT / file
        assert path.exists(), file
        if name and path.suffix == ".py":
            last = name.rpartition(".")[2]
            defined = rf"^\s*(?:async )?(?:def|class) {last}\b|^\s*{last}\b.*="
            assert re.search(defined, path.read_text(encoding="utf-8"), re.MULTILINE), (file, name)
    for dotted in NAME.findall(text):
        if not FILE_NAMES.search(dotted):
            pkgutil.resolve_name(dotted)


@pytest.mark.parametrize("way", ["in", "out", "between"])
def test_a_way_through_the_code_names_its_functions(way: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"^## The way {way}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    named = {dotted: pkgutil.resolve_name(dotted) for dotted in NAME.findall(section)}
    named |= {f"{file}:{name}": _function(file, name) for file, name in FILE.findall(section)}
    functions = {name for name, found in named.items() if isfunction(found)}
    assert len(functions) >= 8, sorted(functions)


def _function(file: str, name: str) -> object:
    """The object of `path/file.py:name`; None for a file without a name."""
    module = file.removesuffix(".py").replace("/", ".")
    return pkgutil.resolve_name(f"{module}:{name}") if name else None


def test_the_guarantees_name_their_tests() -> None:
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    assert len([file for file, name in FILE.findall(text) if name]) >= 16


def test_the_index_of_decisions_has_each_with_its_number_and_title() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for file in folder.glob("0*.md"):
        heading = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        number, _, title = heading.partition(". ")
        assert number == file.name[:4].lstrip("0")
        assert f"| {number} | [{title}]({file.name})" in index
