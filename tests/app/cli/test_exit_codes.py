"""Every exit code of docs/cli.md, each by what brings it about."""

from __future__ import annotations

import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from app.cli import output
from app.cli.files import delimited
from app.cli.output import Access
from app.cli.program import app
from app.cli.serve import TRUST
from sdstore.client.exchange import BATCH_ITEMS_MAX, ClientOptions, Retry
from sdstore.sds.codec import encode
from sdstore.wire import store_pb2 as wire
from tests.support.cli import Result, cli, command, free_port, http_server, process
from tests.support.federation import message

FRAMES = b"".join(delimited(encode(message(number))) for number in range(20))


def error_code(result: Result) -> str:
    """The stable word of the one line on stderr."""
    (line,) = result.err.splitlines()
    prefix, code, _ = line.split(": ", 2)
    assert prefix == "sdstore"
    return code


def test_done_is_0(node: str) -> None:
    assert cli("publish", "-", "--node", node, stdin=FRAMES).code == 0
    assert cli("get", "m3", "--node", node).code == 0
    assert cli("channels", "--node", node).code == 0
    assert cli("version").code == 0


def test_in_sync_is_0_and_different_is_1(node: str, other_node: str) -> None:
    frame = encode(message(1, "only on one side"))
    assert cli("publish", "-", "--node", node, "--format", "frame", stdin=frame).code == 0
    assert cli("sync", other_node, "--node", node, "--dry-run").code == 1
    assert cli("sync", other_node, "--node", node).code == 0
    assert cli("sync", other_node, "--node", node, "--dry-run").code == 0


@pytest.mark.parametrize("verb", [("get", "nobody"), ("hint", "00ff")])
def test_not_found_is_1(node: str, verb: tuple[str, ...]) -> None:
    result = cli(*verb, "--node", node)
    assert (result.code, error_code(result)) == (1, "not_found")


def test_a_database_that_is_not_there_is_1_and_is_not_made(tmp_path: Path) -> None:
    result = cli("check", "--data-dir", tmp_path / "none")
    assert (result.code, error_code(result)) == (1, "not_found")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["fetch"], "usage"),
        (["get"], "usage"),
        (["get", "x", "--colour"], "usage"),
        (["publish", "-", "--format", "xml"], "usage"),
        (["hint", "zz"], "invalid_hex"),
        (["get", "x", "--digest", "zz"], "invalid_hex"),
        (["get", "x", "--node", "localhost:8000"], "invalid_parameter"),
        (["get", "x", "--node", "http://"], "invalid_parameter"),
        (["sync", "http://store.example", "--node", "http://[::1"], "invalid_parameter"),
        (["tail", "x", "--node", "http://localhost:99999"], "invalid_parameter"),
        (["backfill", "x", "--into", "-", "--node", "http://h?x"], "invalid_parameter"),
        (["get", "x", "--out", "-", "--json"], "invalid_parameter"),
        (["backfill", "x", "--into", "/dev/stdout", "--json"], "invalid_parameter"),
        (["export", "-", "--json"], "invalid_parameter"),
        (["publish", "/nowhere/messages.ldp"], "cannot_read"),
        (["publish", "-", "--hint", "00"], "invalid_parameter"),
        (["snapshot", "verify", ".", "--node", "localhost:8000"], "invalid_parameter"),
        (["quarantine", "drop", "zz"], "invalid_hex"),
        (["serve", "--port", "99999"], "invalid_setting"),
        (["serve", "--config", "/nowhere/node.toml"], "invalid_setting"),
        (["serve", "--database", "mysql://x", "--show-config"], "invalid_setting"),
        (["serve", "--workers", "65"], "invalid_setting"),
        (["serve", "--workers", "2"], "invalid_setting"),
        (["serve", "--tls-cert", "/nowhere/cert.pem"], "invalid_setting"),
    ],
)
def test_a_wrong_command_line_is_2(arguments: list[str], code: str) -> None:
    result = cli(*arguments)
    assert (result.code, error_code(result)) == (2, code)


def test_a_hint_in_base64_is_refused_with_its_hexadecimal_form() -> None:
    assert cli("hint", "qrs=").err.endswith("if this is base64, write aabb\n")


@pytest.mark.parametrize(
    "verb",
    [
        ("get", "\udcff"),
        ("get", "x", "--channel", "\udcff"),
        ("gaps", "\udcff"),
        ("tail", "\udcff", "--no-follow"),
        ("backfill", "\udcff", "--into", "/dev/null"),
    ],
)
def test_an_argument_that_is_not_utf_8_is_2(node: str, verb: tuple[str, ...]) -> None:
    result = cli(*verb, "--node", node)
    assert (result.code, error_code(result)) == (2, "invalid_parameter")


def test_no_verb_is_2_and_shows_the_help() -> None:
    result = cli()
    assert result.code == 2
    assert "publish" in result.out


def test_an_unknown_environment_variable_is_2() -> None:
    result = process("serve", "--show-config", SDSTORE_PROT="9000")
    assert (result.code, error_code(result)) == (2, "invalid_setting")
    assert "prot" in result.err


@pytest.mark.parametrize(
    ("url", "flags"),
    [
        ("ftp://store.example", ()),
        ("http://xn--a", ()),
        ("store.example", ()),
        ("http://10.0.0.1:8000", ("--host", "0.0.0.0", "--insecure")),
        ("http://169.254.169.254", ()),
    ],
)
def test_a_peer_that_no_node_can_have_is_2_and_named(
    url: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    flags = ("--peer", "http://good.example", "--peer", url, *flags)
    result = process("serve", "--port", 0, "--data-dir", tmp_path, *flags)
    assert (result.code, error_code(result)) == (2, "invalid_setting")
    assert f"peers (flag): {url!r}" in result.err
    from_environment = process("serve", "--show-config", SDSTORE_PEERS="http://user@x.example")
    assert (from_environment.code, error_code(from_environment)) == (2, "invalid_setting")
    assert "peers (environment): 'http://user@x.example'" in from_environment.err


def test_a_busy_peer_is_3(node: str) -> None:
    with http_server(503, b"busy") as peer:
        result = cli("sync", peer, "--node", node)
    assert (result.code, error_code(result)) == (3, "overloaded")


def test_refused_messages_are_4_and_spoil_no_other(node: str) -> None:
    bad = delimited(b"\xff\xff")
    result = cli("publish", "-", "--node", node, stdin=bad + FRAMES)
    assert result.code == 4
    assert "message 1: malformed_frame" in result.err
    assert "1 refused" in result.out
    assert cli("get", "m19", "--node", node).code == 0


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("disk_full", 507, 6),
        ("store_unavailable", 503, 6),
        ("not_ready", 503, 6),
        ("overloaded", 503, 3),
    ],
)
@pytest.mark.parametrize("stored_count", [0, 600])
def test_publishing_stops_at_the_first_batch_that_the_node_cannot_store(
    code: str, status: int, exit_code: int, stored_count: int
) -> None:
    frames = delimited(encode(message(1))) * (BATCH_ITEMS_MAX + 1)
    fault = wire.Problem(code=code, status=status, detail="out of order")
    outcomes = [wire.PublishOutcome(outcome="stored", digest=bytes(32))] * stored_count
    outcomes += [wire.PublishOutcome(outcome="refused", problem=fault)] * (
        BATCH_ITEMS_MAX - stored_count
    )
    body = wire.PublishOutcomes(outcomes=outcomes).SerializeToString()
    # To a second batch, of one message, this would be a malformed reply.
    with http_server(200, body, {"content-type": "application/x-protobuf"}) as full:
        shown = cli("publish", "-", "--node", full, stdin=frames)
        as_json = cli("publish", "-", "--node", full, "--json", stdin=frames)
    published = f"600 messages: {stored_count} stored" if stored_count else "0 messages"
    assert (shown.code, shown.out) == (exit_code, "")
    assert shown.err == (
        f"sdstore: {code}: out of order; published {published}. Publishing the same again is safe: "
        "messages that the node has already count as duplicates.\n"
    )
    assert (as_json.code, as_json.err) == (shown.code, shown.err)
    assert [line["outcome"] for line in as_json.lines].count("stored") == stored_count
    assert len(as_json.lines) == BATCH_ITEMS_MAX


def test_a_peer_url_that_is_not_allowed_is_4(node: str) -> None:
    result = cli("sync", "http://user@127.0.0.1", "--node", node)
    assert (result.code, error_code(result)) == (4, "peer_url_refused")


def test_a_sync_of_a_node_with_itself_is_4(node: str) -> None:
    result = cli("sync", node, "--node", node)
    assert result.code == 4
    assert error_code(result) == "peer_url_refused"
    assert "this node itself" in result.err


def test_a_public_address_without_credentials_is_4(tmp_path: Path) -> None:
    result = cli("serve", "--host", "0.0.0.0", "--data-dir", tmp_path)
    assert (result.code, error_code(result)) == (4, "insecure_bind")


def test_a_dead_peer_is_5(node: str) -> None:
    result = cli("sync", f"http://127.0.0.1:{free_port()}", "--node", node)
    assert (result.code, error_code(result)) == (5, "peer_unreachable")


@pytest.mark.parametrize(
    ("status", "body", "headers", "code"),
    [
        (200, b"<html>hello</html>", {}, "peer_misbehaved"),
        (200, b"\xff" * 100, {"content-encoding": "zstd"}, "peer_misbehaved"),
        (200, b"", {"content-encoding": "gzip"}, "peer_misbehaved"),
        (404, b"not here", {}, "peer_misbehaved"),
        # Something between the stores answered: a captive portal, a proxy.
        (302, b"", {"location": "http://169.254.169.254/"}, "peer_unreachable"),
    ],
)
def test_a_peer_that_is_no_store_is_5(
    node: str, status: int, body: bytes, headers: dict[str, str], code: str
) -> None:
    with http_server(status, body, headers) as peer:
        result = cli("sync", peer, "--node", node)
    assert (result.code, error_code(result)) == (5, code)


def test_a_node_that_is_not_there_is_6() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = cli("channels", "--node", url)
    assert (result.code, error_code(result)) == (6, "unreachable")
    assert url in result.err


def test_waiting_for_a_node_ends_when_it_is_ready_and_in_vain_with_6(node: str) -> None:
    assert cli("wait", "--node", node, "--json").json["url"] == node
    for url in (f"http://127.0.0.1:{free_port()}", f"{node}/nowhere"):
        result = cli("wait", "--node", url, "--timeout", 0)
        assert (result.code, error_code(result)) == (6, "timeout")
        assert url in result.err


def test_a_backfill_of_a_channel_that_the_node_does_not_know_is_1_and_leaves_no_file(
    node: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.ldp"
    result = cli("backfill", "typo", "--into", file, "--node", node)
    assert (result.code, error_code(result), file.exists()) == (1, "not_found", False)
    assert "'typo'" in result.err
    file.touch()
    assert cli("backfill", "typo", "--into", file, "--node", node).code == 1
    assert file.exists()
    file.unlink()
    dead = f"http://127.0.0.1:{free_port()}"
    result = cli("backfill", "typo", "--into", file, "--node", dead)
    assert (result.code, file.exists()) == (6, False)


def test_a_package_that_is_not_installed_is_6_and_sends_nobody_to_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("psycopg", "app.store.postgres", "py4j.protocol"):
        monkeypatch.setitem(sys.modules, name, None)
    for verb in (
        ("snapshot", "verify", tmp_path),
        ("check", "--database", "postgresql://nowhere/x"),
        ("check", "--deep", "--database", "postgresql://nowhere/x"),
        ("reindex", "--database", "postgresql://nowhere/x"),
    ):
        result = cli(*verb)
        assert (result.code, result.err.count("\n")) == (6, 1)
        assert "make setup" in result.err
        assert re.search(r"pip install '\.\[(spark|postgres)\]'", result.err)


def test_a_port_that_is_taken_is_6(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = cli("serve", "--port", taken.getsockname()[1], "--data-dir", tmp_path)
    assert (result.code, error_code(result)) == (6, "cannot_listen")


def test_a_second_node_on_the_same_database_is_6(node: str, node_folder: Path) -> None:
    assert cli("channels", "--node", node).code == 0
    result = process("serve", "--port", "0", "--data-dir", node_folder)
    assert (result.code, error_code(result)) == (6, "data_dir_in_use")
    other = node_folder.with_name("another folder")
    database = f"sqlite:///{node_folder}/sdstore.db"
    result = process("serve", "--port", "0", "--data-dir", other, "--database", database)
    assert (result.code, error_code(result)) == (6, "store_unavailable")


def test_interrupting_a_node_is_130_and_terminating_it_0(tmp_path: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        with subprocess.Popen(
            command("serve", "--port", 0, "--data-dir", tmp_path, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as serving:
            assert serving.stdout is not None
            serving.stdout.readline()
            serving.send_signal(number)
            try:
                _, err = serving.communicate(timeout=30)
            finally:
                serving.kill()
        lines = err.decode().splitlines()
        assert (serving.returncode, len(lines), TRUST in lines[0]) == (code, 1, True)
        # The store that is left is intact.
        assert cli("check", "--data-dir", tmp_path).code == 0


# --- one table for all verbs with --node -----------------------------------------------------------


def verbs_of_a_node(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every verb that takes --node, and its parameters; what is in a group is "group verb"."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from verbs_of_a_node(command, *path, name)
        elif any("--node" in each.opts for each in command.params):
            yield " ".join((*path, name)), command.params


NODE_VERBS = dict(verbs_of_a_node(typer.main.get_command(app)))
for its_own in ("wait", "indexer"):  # one asks /readyz only, one runs until it is told to stop
    del NODE_VERBS[its_own]
VALUES = {"HEX": "00", "DIGEST": "00" * 32, "PEER_URL": "http://store.example"}
OPTIONS = {
    "interests set": ["--all"],
    "publish": ["--format", "frame"],
    "retire": ["--reason", "x"],
}


def run_verb(verb: str, url: str, folder: Path) -> Result:
    frame, into = folder / "frame", folder / "into.ldp"
    frame.write_bytes(encode(message(1)))
    arguments = [
        str(frame) if each.metavar == "FILE" else VALUES.get(each.metavar, "x")
        for each in NODE_VERBS[verb]
        if each.param_type_name == "argument"
    ]
    into_option = ["--into", into] if verb == "backfill" else []
    return cli(*verb.split(), *arguments, *OPTIONS.get(verb, ()), *into_option, "--node", url)


def problem_document(status: int, code: str) -> tuple[int, bytes, dict[str, str]]:
    body = f'{{"status": {status}, "code": "{code}", "detail": "why"}}'.encode()
    return status, body, {"content-type": "application/problem+json"}


ANSWERS = {
    (1, "not_found"): problem_document(404, "not_found"),
    (3, "overloaded"): problem_document(503, "overloaded"),
    (4, "unauthenticated"): problem_document(401, "unauthenticated"),
    (5, "malformed_reply"): (200, b"{}", {"content-type": "application/json"}),
    (6, "internal_error"): problem_document(500, "internal_error"),
    (6, "not_a_store"): (302, b"", {"location": "https://login.example"}),
    (6, "unreachable"): None,
}


@pytest.mark.parametrize("answered", ANSWERS, ids=lambda each: each[1])
def test_every_verb_that_calls_a_node_has_the_same_codes_for_the_same_answer(
    answered: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PATIENCE", ClientOptions(retry=Retry(attempts_max=1)))
    tls = ssl.create_default_context()  # once: loading all CAs takes 20 ms
    monkeypatch.setattr(Access, "tls", lambda _: tls)
    answer = ANSWERS[answered]
    with http_server(*answer) if answer else nullcontext(f"http://127.0.0.1:{free_port()}") as url:
        results = {verb: run_verb(verb, url, tmp_path) for verb in NODE_VERBS}
    found = {verb: (result.code, error_code(result)) for verb, result in results.items()}
    assert {verb: each for verb, each in found.items() if each != answered} == {}
