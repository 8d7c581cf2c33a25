"""docs/participant.md: its examples run, its tables are those of the code, its tests exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.participant_page import PAGE, page

TEXT = PAGE.read_text(encoding="utf-8")
TESTS = Path(__file__).parent
CLAUSE = re.compile(r"^\| (?!clause|\*|-)(.+) \| ([12LR, ]+) \| (.*) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_the_tables_of_bounds_are_those_of_the_code() -> None:
    assert page() == TEXT, "run: python -m tests.support.participant_page"


def test_every_bound_has_a_meaning() -> None:
    rows = re.findall(r"^\| `\w+` \| (.+) \| (.*) \|$", TEXT, re.MULTILINE)
    assert len(rows) > 60
    assert [row for row in rows if not row[1].strip()] == []


def test_the_examples_run_one_after_the_other_and_print_what_they_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {"__name__": "example"}
    for example in examples:
        exec(compile(example, "docs/participant.md", "exec"), names)
        printed = capsys.readouterr().out
        said = re.findall(r"print\(.*\)  # (\w+)$", example, re.MULTILINE)
        assert said
        assert set(said) <= set(printed.split())


CLAUSES = CLAUSE.findall(TEXT)


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
