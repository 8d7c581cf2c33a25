"""docs/guarantees.md names tests; each of them has to exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_a_guarantee_names_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) >= 16
    gone = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert not gone
