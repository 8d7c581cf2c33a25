"""docs/participant.md: its examples run, its options are those of the code. specification.md: its tests exist."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from sdstore.sds.options import ParticipantOptions
from sdstore.sds.repair import RepairOptions

TESTS = Path(__file__).parent
TEXT = (TESTS.parents[1] / "docs" / "participant.md").read_text(encoding="utf-8")
CLAUSE = re.compile(r"^\| (?!clause|\*|-)(.+) \| ([12LR, ]+) \| (.*) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def shown(value: Any) -> str:
    """A default value as the page prints it."""
    if value is None:
        return "ms"  # the default unit of the default dialect
    if isinstance(value, RepairOptions):
        return "`RepairOptions()`"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "`SHA256_MESSAGE`" if hasattr(value, "make") else f"`{value!r}`"


def test_the_options_of_the_page_have_their_defaults() -> None:
    [table] = re.findall(r"^## Options\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    default = ParticipantOptions()
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", table, re.MULTILINE)
    assert len(rows) == 8
    for names, values in rows:
        found = [shown(getattr(default, name)) for name in re.findall(r"`(\w+)`", names)]
        assert ", ".join(found) == values


@pytest.mark.parametrize("kind", [ParticipantOptions, RepairOptions])
def test_every_option_has_a_docstring(kind: type) -> None:
    """The page refers to them: they are the reference."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    described = set()
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str())):
                described.add(name)
    assert described == {each.name for each in fields(kind)}


def test_the_examples_run_one_after_the_other_and_print_what_they_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    app = examples.pop(0)  # tests/test_small_app.py runs it
    assert "__main__" in app
    assert len(examples) == 3
    names: dict[str, Any] = {"__name__": "example"}
    for example in examples:
        exec(compile(example, "docs/participant.md", "exec"), names)
        printed = capsys.readouterr().out
        said = re.findall(r"print\(.*\)  # (\w+)$", example, re.MULTILINE)
        assert said
        assert set(said) <= set(printed.split())


CLAUSES = CLAUSE.findall((TESTS / "specification.md").read_text(encoding="utf-8"))


def test_the_table_of_the_specification_has_every_clause() -> None:
    """Counted in the texts; a row that is lost shows here."""
    of_version = {
        version: [clause for clause, versions, _, _ in CLAUSES if version in versions]
        for version in "12LR"
    }
    assert {version: len(clauses) for version, clauses in of_version.items()} == {
        "1": 47,
        "2": 56,
        "L": 59,
        "R": 18,
    }
    for word in ("MUST", "MUST NOT", "SHOULD", "MAY", "RECOMMENDED"):
        assert any(word in clause for clause, _, _, _ in CLAUSES)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause[0])
def test_a_clause_names_tests_that_exist(clause: tuple[str, str, str, str]) -> None:
    named = NAMED.findall(clause[3])
    assert ", ".join(f"`{file}::{test}`" for file, test in named) == clause[3]
    for file, test in named:
        source = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), (file, test)
