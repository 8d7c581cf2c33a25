"""The interest of a running node, over HTTP and by the verbs of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.output import Exit
from recon.limits import INTEREST_NAMES_MAX
from tests.support.cli import cli
from tests.support.federation import message
from tests.support.server import RunningNode, running_node

PATH = "/v1/recon/interests"
EVERYTHING = {
    "all": True,
    "channels": [],
    "prefixes": [],
    "lamport_from": None,
    "lamport_to": None,
}


def test_an_interest_is_changed_in_canonical_form_and_the_reply_counts_what_stays(
    tmp_path: Path,
) -> None:
    with running_node(tmp_path, channels=["a"]) as node:
        for n, channel in enumerate(["a", "a", "b", "c/1", "c/2"]):
            node.publish(message(n, channel))
        found = node.http.get(PATH).json()
        assert (found["channels"], found["origin"], found["set_at_ms"]) == (["a"], "settings", None)
        body = {"channels": ["b", "a", "b", "c/1"], "prefixes": ["c/", "c/2"], "lamport_to": "4"}
        changed = node.http.put(PATH, json=body)
        assert changed.status_code == 200
        document = changed.json()
        assert (document["channels"], document["prefixes"]) == (["a", "b"], ["c/"])
        assert (document["lamport_from"], document["lamport_to"]) == (None, "4")
        assert document["origin"] == "operator"
        assert (document["outside"]["channels"], document["outside"]["entries"]) == (0, 1)
        assert node.http.get(PATH).json() == {k: document[k] for k in found}
        document = node.http.put(PATH, json={"channels": ["b"]}).json()
        assert (document["outside"]["channels"], document["outside"]["entries"]) == (3, 4)
        assert "stay readable" in document["outside"]["detail"]
        assert node.http.get("/v1/messages/m0").status_code == 200
        assert node.publish(message(9, "elsewhere")).status_code == 201
        document = node.http.put(PATH, json={"channels": []}).json()
        assert (document["all"], document["channels"]) == (False, [])
        document = node.http.delete(PATH).json()
        assert (document["channels"], document["origin"]) == (["a"], "settings")
        assert node.http.delete(PATH).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_body"),
        ({"lamport_from": 1}, "invalid_body"),
        ({"all": True, "channels": ["a"]}, "invalid_body"),
        ({"all": "everything"}, "invalid_body"),
        ({"channels": "a"}, "invalid_body"),
        ({"channels": [1]}, "invalid_body"),
        ({"channels": ["\ud800"]}, "invalid_body"),
        ({"channels": ["x"], "unknown": 1}, "invalid_body"),
        ({"channels": ["x"], "lamport_from": 1.5}, "invalid_body"),
        ({"channels": ["x"], "lamport_from": True}, "invalid_body"),
        ({"channels": ["x"], "lamport_from": "1e3"}, "invalid_body"),
        ({"channels": ["x"], "lamport_from": 2**63}, "invalid_parameter"),
        ({"channels": ["x"], "lamport_to": "-9223372036854775809"}, "invalid_parameter"),
        ({"channels": ["x"], "lamport_from": 3, "lamport_to": 3}, "invalid_parameter"),
        ({"channels": ["x" * 257]}, "invalid_parameter"),
        ({"channels": [str(n) for n in range(INTEREST_NAMES_MAX + 1)]}, "invalid_body"),
        ({"channels": [f"{n:0256}" for n in range(6_000)]}, "too_many_items"),
        ([], "invalid_body"),
        (None, "invalid_body"),
    ],
)
def test_an_odd_interest_is_refused_and_changes_nothing(
    shared_node: RunningNode, body: Any, code: str
) -> None:
    headers = {"content-type": "application/json"}
    refused = shared_node.http.put(PATH, content=json.dumps(body), headers=headers)
    assert (refused.status_code // 100, refused.json()["code"]) == (4, code)
    assert "Value error" not in refused.json()["detail"]
    found = shared_node.http.get(PATH).json()
    assert {key: found[key] for key in EVERYTHING} == EVERYTHING


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A node that wants everything."""
    with running_node(tmp_path_factory.mktemp("node")) as node:
        yield node


def test_the_verbs_change_show_and_reset_an_interest(tmp_path: Path) -> None:
    with running_node(tmp_path, channels=["a"]) as node:
        node.publish(message(1, "other"))
        shown = cli("interests", "list", "--node", node.url)
        assert (shown.out, shown.code) == ("a\n", 0)
        assert "settings" in shown.err
        options = ("--channel", "x", "--prefix", "p/", "--from-lamport", 3)
        changed = cli("interests", "set", *options, "--node", node.url)
        assert changed.out.splitlines() == ["x", "p/*", "Lamport timestamps from 3"]
        assert "operator" in changed.err
        assert "stay readable" in changed.err
        document = json.loads(cli("interests", "list", "--node", node.url, "--json").out)
        assert (document["channels"], document["origin"]) == (["x"], "operator")
        assert cli("interests", "reset", "--node", node.url).out == "a\n"
        assert cli("interests", "set", "--node", node.url).code == Exit.USAGE
        for empty in ("--channel", "--prefix"):  # such as a variable that is not set
            assert cli("interests", "set", empty, "", "--node", node.url).code == Exit.USAGE
        assert cli("interests", "set", "--all", "--node", node.url).out == "every channel\n"
