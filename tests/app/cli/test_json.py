"""`--json` of each verb: its shape is pinned."""

from __future__ import annotations

import json
from pathlib import Path

from app.cli.files import delimited
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings
from sdstore.sds.codec import encode, to_json
from sdstore.sds.model import Dialect, entry_digest
from tests.support.cli import cli, process
from tests.support.federation import message

SYNC_KEYS = {
    "id", "peer_url", "peer_id", "channels", "dry_run", "state", "started_at_ms",
    "finished_at_ms", "progress", "report", "started_by", "process", "outcome", "entries_per_s",
    "bytes_per_s", "eta_s",
}  # fmt: skip
REPORT_KEYS = {
    "outcome", "code", "detail", "elements", "missing_here", "missing_there", "proved", "rounds",
    "requests", "bytes_up", "bytes_down", "entries_received", "entries_sent",
    "entries_refused", "claims_received", "claims_sent", "claims_refused", "seconds",
    "set_aside_count", "set_aside", "mended", "lost_here",
}  # fmt: skip


def test_publish_prints_one_outcome_a_line(node: str) -> None:
    one = message(1, "json/publish")
    frames = delimited(encode(one)) + delimited(b"junk") + delimited(encode(one))
    result = cli("publish", "-", "--json", "--node", node, stdin=frames)
    stored = {
        "item": 1,
        "outcome": "stored",
        "message_id": "m1",
        "channel_id": "json/publish",
        "digest": entry_digest(one).hex(),
    }
    refused = result.lines[1]
    assert result.lines[0] == stored
    assert refused.keys() == {"item", "outcome", "code", "detail"}
    assert (refused["item"], refused["code"]) == (2, "malformed_frame")
    assert result.lines[2] == stored | {"item": 3, "outcome": "duplicate"}


def test_get_prints_the_message_as_it_can_be_published_again(node: str, other_node: str) -> None:
    one = message(1, "json/get", content=b"\x00\xff binary")
    frame = encode(one, Dialect.NIM)
    cli("publish", "-", "--format", "frame", "--node", node, stdin=frame)
    found = cli("get", "m1", "--channel", "json/get", "--json", "--node", node)
    assert found.json["message"] == to_json(one)
    assert found.json["meta"]["digest"] == entry_digest(one).hex()
    assert found.json["meta"].keys() == {"digest", "frame_hash", "dialect", "other_variants_count"}
    assert found.json["meta"]["dialect"] == "nim"
    again = cli("publish", "-", "--json", "--node", other_node, stdin=found.out.encode())
    assert again.json["digest"] == entry_digest(one).hex()


def test_get_counts_the_variants_of_the_one_asked_for_too(node: str) -> None:
    variants = [message(3, "json/get", content=content) for content in (b"one", b"other")]
    for each in variants:
        cli("publish", "-", "--format", "frame", "--node", node, stdin=encode(each))
    for each in variants:
        digest = entry_digest(each).hex()
        wanted = ("get", "m3", "--channel", "json/get", "--digest", digest)
        meta = cli(*wanted, "--json", "--node", node).json["meta"]
        assert (meta["digest"], meta["other_variants_count"]) == (digest, 1)


def test_get_writes_the_frame_byte_for_byte(node: str, tmp_path: Path) -> None:
    frame = encode(message(2, "json/get"), Dialect.NIM)
    cli("publish", "-", "--format", "frame", "--node", node, stdin=frame)
    wanted = ("get", "m2", "--channel", "json/get", "--node", node, "--out")
    document = cli(*wanted, tmp_path / "frame", "--json").json
    assert (tmp_path / "frame").read_bytes() == frame
    assert document["message"]["message_id"] == "m2"
    assert cli(*wanted, "-").out.encode() == frame


def test_hint_prints_one_message_a_line(node: str) -> None:
    frame = encode(message(1, "json/hint"))
    cli("publish", "-", "--format", "frame", "--hint", "abcd", "--node", node, stdin=frame)
    (found,) = cli("hint", "abcd", "--json", "--node", node).lines
    assert found.keys() == {"message", "meta"}
    assert found["meta"]["hints"] == ["abcd"]


def test_channels_prints_one_channel_a_line(node: str) -> None:
    for number in (-7, 9):
        frame = encode(message(number, "json/channels"))
        cli("publish", "-", "--format", "frame", "--node", node, stdin=frame)
    lines = cli("channels", "--json", "--node", node).lines
    assert {
        "channel_id": "json/channels",
        "count": 2,
        "lamport_first": "-7",
        "lamport_last": "9",
    } in lines


def test_sync_prints_the_session(node: str, other_node: str) -> None:
    cli("publish", "-", "--format", "frame", "--node", node, stdin=encode(message(1, "json/sync")))
    arguments = ("sync", other_node, "--node", node, "--channel", "json/sync", "--json")
    session = cli(*arguments).json
    assert session.keys() == SYNC_KEYS
    assert session["report"].keys() == REPORT_KEYS
    assert session["channels"] == ["json/sync"]
    assert (session["report"]["outcome"], session["report"]["entries_sent"]) == ("in_sync", 1)


def test_check_prints_what_it_looked_at(node: str, node_folder: Path) -> None:
    cli("publish", "-", "--format", "frame", "--node", node, stdin=encode(message(1, "json/check")))
    report = cli("check", "--deep", "--json", "--data-dir", node_folder).json
    assert report.keys() == {
        "sound",
        "deep",
        "channels",
        "entries",
        "lost",
        "damages",
        "advice",
        "unchecked",
    }
    assert (report["sound"], report["deep"], report["damages"]) == (True, True, [])
    assert report["entries"] >= 1


def test_show_config_prints_values_and_where_they_are_from(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('port = 1\nsync_interval_s = 5\npeers = ["http://a"]\n')
    shown = process(
        "serve", "--show-config", "--json", "--config", file, "--port", 3,
        SDSTORE_SYNC_INTERVAL_S="6", SDSTORE_PORT="2",
    ).json  # fmt: skip
    assert shown.keys() == Settings.model_fields.keys()
    assert shown["port"] == {"value": 3, "from": "flag"}
    assert shown["sync_interval_s"] == {"value": 6.0, "from": "environment"}
    assert shown["peers"] == {"value": ["http://a"], "from": f"file {file}"}
    assert shown["host"] == {"value": "127.0.0.1", "from": "default"}


def test_show_limits_prints_every_bound() -> None:
    shown = cli("serve", "--show-limits", "--json").json
    assert shown["frame_bytes_max"]["value"] == DEFAULT_LIMITS.frame_bytes_max
    assert all(bound.keys() == {"value", "unit", "reason"} for bound in shown.values())


def test_openapi_is_one_document_on_one_line() -> None:
    assert cli("openapi", "--json").json == json.loads(cli("openapi").out)
    assert cli("openapi", "--json").json["openapi"].startswith("3.")


def test_version_names_what_compatibility_depends_on() -> None:
    keys = {"sdstore", "recon_protocol", "decoder", "python", "sqlite"}
    assert cli("version", "--json").json.keys() == keys


def test_the_demo_ends_equal_and_says_so() -> None:
    result = process("demo", "--messages", "300", "--json")
    assert result.code == 0, result.err
    summary = result.json
    assert summary.keys() == {"equal", "messages", "dry_run", "sync"}
    assert summary["equal"] is True
    assert summary["sync"].keys() == REPORT_KEYS
    assert summary["sync"]["entries_received"] > 50
