"""`tools.house` counts what a request makes run, in any thread and at its peer, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from app.federation import interests
from app.federation.interests import Interests
from app.ingest.door import Door
from app.recon.endpoint import ReconEndpoint
from app.store.groupwriter import GroupWriter
from tools.house import ROOT, crossed, lines_of_modules


def planted(name: str) -> Callable[[], None]:
    """A function of a module `app/planted_NAME.py`."""
    space: dict[str, Any] = {}
    code = compile("def run(): pass", ROOT / "app" / f"planted_{name}.py", "exec")
    exec(code, space)
    run: Callable[[], None] = space["run"]
    return run


def test_planted_calls_are_counted_where_a_request_makes_them_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def also(owner: type, method: str, name: str) -> None:
        right, plant = getattr(owner, method), planted(name)
        monkeypatch.setattr(owner, method, lambda *a, **o: (plant(), right(*a, **o))[1])

    also(Door, "publish", "route")
    also(GroupWriter, "write", "writer")
    also(ReconEndpoint, "answer", "responder")
    look, in_background, written = Interests.look, planted("background"), planted("written")

    async def looked(self: Interests) -> None:
        in_background()
        await self._committer.call(written)
        await look(self)

    monkeypatch.setattr(Interests, "look", looked)
    monkeypatch.setattr(interests, "LOOK_S", 0.005)
    found = {
        name: {path.stem for path in paths if path.stem.startswith("planted_")}
        for name, paths in crossed().items()
    }
    assert found == {
        "POST": {"planted_route", "planted_writer"},
        "GET": set(),
        "page": set(),
        "sync": {"planted_writer", "planted_responder"},
    }


def test_the_architecture_page_has_the_figures_of_today() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-zA-Z ]+) \| ([\d,]+)(?: lines)? \|$", page, re.MULTILINE)
    said = {name: int(number.replace(",", "")) for name, number in rows}
    lines, paths = lines_of_modules(), crossed()
    assert said["modules"] == len(lines)
    assert said["lines"] == pytest.approx(sum(lines.values()), rel=0.01)
    assert said["median module"] == pytest.approx(median(lines.values()), rel=0.05)
    # Which of two branches a request takes can depend on the moment.
    for name, operation in (
        ("modules crossed by a POST", "POST"),
        ("by a GET", "GET"),
        ("by a page", "page"),
        ("by a sync", "sync"),
    ):
        assert said[name] == pytest.approx(len(paths[operation]), abs=2), name
