"""`tools.house` counts what a request makes run, in any thread and at its peer, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app import interests
from app.ingest.door import Door
from app.interests import Interests
from app.recon.endpoint import ReconEndpoint
from app.store.groupwriter import GroupWriter
from tools.house import ROOT, crossed


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
