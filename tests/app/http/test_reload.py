"""Settings are read again on SIGHUP and over HTTP; what takes a restart is named."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography import x509

from app.access.operator import token_for
from app.access.tokens import TokenFile, tokens_path
from app.federation.peers import LOOK_S
from app.server.node import CHANGEABLE
from app.server.settings import Settings
from recon.initiator import hello_request
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.wire.recon_pb2 import ReconResponse
from tests.support.cli import cli, command
from tests.support.server import AS_OPERATOR, running_node
from tests.support.stores import PostgresStores

SECONDS_MAX = 60
STOPS_WITHIN_S = 1.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until something is so."""
    ends_s = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@contextmanager
def serving(
    folder: Path, text: str, *flags: object
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A node with a settings file: its process, its URL and the file. Its log is FOLDER/log."""
    file = folder / "node.toml"
    file.write_text(text)
    arguments = ("serve", "--port", 0, "--data-dir", folder / "data", "--json", "--config", file)
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command(*arguments, *flags), stdout=subprocess.PIPE, stderr=log) as node,
    ):
        try:
            assert node.stdout is not None
            yield node, json.loads(node.stdout.readline())["url"], file
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(SECONDS_MAX)


def two_workers(stores: PostgresStores) -> tuple[object, ...]:
    """The flags of a service of two processes over a new database."""
    return ("--workers", 2, "--database", stores.new_url())


def test_every_changeable_setting_exists() -> None:
    assert set(Settings.model_fields) > CHANGEABLE


def test_a_reload_takes_over_what_can_change_and_names_the_rest(tmp_path: Path) -> None:
    text = 'drain_s = 0\nchannels = ["a"]\npeers = ["http://127.0.0.1:1"]\n'
    with serving(tmp_path, text) as (node, url, file):

        def get(path: str) -> dict[str, object]:
            document: dict[str, object] = httpx.get(
                f"{url}{path}", trust_env=False, auth=AS_OPERATOR, timeout=30
            ).json()
            return document

        def peer_urls() -> list[str]:
            return [each["url"] for each in get("/v1/peers")["peers"]]  # type: ignore[attr-defined]

        # The peers are looked at for a while after the start anyway.
        time.sleep(1.2 * LOOK_S)
        assert cli("reload", "--node", url).out == "changed: nothing\n"
        file.write_text(
            'drain_s = 0\nchannels = ["b"]\nlog_level = "debug"\ncors_origins = ["*"]\n'
            'peers = ["http://127.0.0.1:2", "http://127.0.0.1:3"]\n'
        )
        answer = httpx.post(f"{url}/v1/reload", trust_env=False, auth=AS_OPERATOR, timeout=30)
        assert answer.json() == {
            "changed": ["peers", "channels", "log_level"],
            "needs_restart": ["cors_origins"],
        }
        assert get("/v1/recon/interests")["channels"] == ["b"]
        wait_until(lambda: set(peer_urls()) == {"http://127.0.0.1:2", "http://127.0.0.1:3"})
        preflight = {"origin": "http://x", "access-control-request-method": "GET"}
        assert (
            httpx.options(
                f"{url}/v1/info", headers=preflight, trust_env=False, auth=AS_OPERATOR
            ).status_code
            != 200
        )
        file.write_text('drain_s = 0\nchannels = ["c"]\npeers = []\nno_such = 1\n')
        refused = httpx.post(f"{url}/v1/reload", trust_env=False, auth=AS_OPERATOR, timeout=30)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_setting")
        assert "no_such" in refused.json()["detail"]
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: "stay as they are" in (tmp_path / "log").read_text())
        assert get("/v1/recon/interests")["channels"] == ["b"]
        assert len(peer_urls()) == 2
        file.write_text('drain_s = 0\nchannels = ["c"]\n')
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: get("/v1/recon/interests")["channels"] == ["c"])
        wait_until(lambda: peer_urls() == [])
        for text in ('log_level = "error"', 'log_level = "error"\nsync_interval_s = 7'):
            file.write_text(f'drain_s = 0\nchannels = ["c"]\n{text}\n')
            assert (
                httpx.post(
                    f"{url}/v1/reload", trust_env=False, auth=AS_OPERATOR, timeout=30
                ).status_code
                == 200
            )
    assert "read again: sync_interval_s" not in (tmp_path / "log").read_text()
    assert "settings read again: peers, channels, log_level" in (tmp_path / "log").read_text()


@dataclass(frozen=True)
class Certificates:
    """A CA that puts one certificate after another in the place of `file`."""

    authority: trustme.CA
    client: ssl.SSLContext
    file: Path

    def replace(self) -> str:
        """Put a new certificate in the place of the old one; its serial number."""
        made = self.authority.issue_cert("127.0.0.1")
        new = self.file.with_suffix(".new")
        made.private_key_and_cert_chain_pem.write_to_path(new)
        new.replace(self.file)
        number: int = x509.load_pem_x509_certificate(self.file.read_bytes()).serial_number
        return f"{number:X}"

    def served(self, port: int | None) -> str:
        """The serial number of the certificate that a new connection gets."""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            self.client.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            found = connection.getpeercert()
            assert found is not None
            return str(found["serialNumber"]).lstrip("0")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    authority = trustme.CA()
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return Certificates(authority, client, tmp_path / "node.pem")


def test_an_expired_certificate_is_said_at_the_start_and_never_replaces_a_valid_one(
    tmp_path: Path, certificates: Certificates
) -> None:
    expired = certificates.authority.issue_cert(
        "127.0.0.1",
        not_before=datetime(2024, 1, 1, tzinfo=UTC),
        not_after=datetime(2025, 2, 3, tzinfo=UTC),
    )

    def not_after_s() -> float:
        answer = httpx.get(f"{url}/metrics", verify=False, trust_env=False, timeout=30)
        [value] = re.findall(
            r"^sdstore_certificate_not_after_seconds ([\d.e+]+)$", answer.text, re.MULTILINE
        )
        return float(value)

    expired.private_key_and_cert_chain_pem.write_to_path(certificates.file)
    flags = ("--tls-cert", certificates.file)
    warning = f"tls_cert {certificates.file} expired at 2025-02-03 00:00:00 UTC"
    with serving(tmp_path, "drain_s = 0\n", *flags) as (node, url, _):
        log = tmp_path / "log"
        assert f"WARNING app.server.node: {warning}: callers refuse it" in log.read_text()
        assert not_after_s() == datetime(2025, 2, 3, tzinfo=UTC).timestamp()
        valid = certificates.replace()
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: "settings read again: tls_cert" in log.read_text())
        assert not_after_s() > time.time()
        expired.private_key_and_cert_chain_pem.write_to_path(certificates.file)
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: f"stay as they are: {warning}" in log.read_text())
        assert certificates.served(httpx.URL(url).port) == valid
        assert not_after_s() > time.time()


def test_a_policy_rates_and_what_strangers_may_do_change_in_a_running_node(tmp_path: Path) -> None:
    (tmp_path / "reload_rules.py").write_text(
        "from app.ingest.policy import ACCEPT, refuse\n"
        "class Open:\n    revision = '1'\n    def __call__(self, candidate):\n        return ACCEPT\n"
        "class Closed:\n    revision = '2'\n    def __call__(self, candidate):\n"
        "        return refuse('closed')\n"
    )
    settings = Settings(data_dir=tmp_path / "data", trust_loopback=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with running_node(tmp_path / "data", trust_loopback=False) as node:
            admin = TokenFile(tokens_path(settings)).create(
                scopes=["admin", "read", "publish", "sync"]
            )[1]
            asks = {"authorization": f"Bearer {admin}"}
            changes: dict[str, object] = {}
            patch.setattr(
                Settings, "read_again", lambda self: self.model_copy(update=changes, deep=True)
            )

            def reload(**new: object) -> httpx.Response:
                changes.clear()
                changes.update(new)
                return node.http.post("/v1/reload", headers=asks)

            def publish(number: int) -> int:
                frame = encode(Message(f"{number}", "/a/b", lamport_timestamp=1, content=b"x"))
                sent = {**asks, "content-type": "application/x-protobuf"}
                return node.http.post("/v1/messages", content=frame, headers=sent).status_code

            def revision() -> object:
                sent = {**asks, "content-type": "application/x-protobuf"}
                raw = hello_request().SerializeToString()
                answer = node.http.post("/v1/recon", content=raw, headers=sent)
                return ReconResponse.FromString(answer.content).policy

            assert publish(1) == 201
            first = revision()
            assert reload(policy="reload_rules:Closed").json()["changed"] == ["policy"]
            assert (publish(2), revision() == first) == (403, False)
            refused = reload(policy="reload_rules:NoSuch", anonymous_read=["*"])
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_setting")
            assert "NoSuch" in refused.json()["detail"]
            assert publish(3) == 403
            assert node.http.get("/v1/messages/1").status_code == 401
            assert reload(policy="reload_rules:Open").status_code == 200
            assert publish(4) == 201
            assert 'sdstore_policy_verdicts_total{verdict="refused"} 2.0' in (
                node.http.get("/metrics", headers=asks).text
            )
            assert reload(policy=None, anonymous_read=["/a/"]).status_code == 200
            assert (publish(5), revision()) == (201, first)
            assert node.http.get("/v1/messages/1").status_code == 200
            changed = reload(anonymous_requests_per_minute=2).json()["changed"]
            assert changed == ["anonymous_requests_per_minute"]
            answers = [node.http.get("/v1/messages/1").status_code for _ in range(3)]
            # What was spent of the larger bucket is a part of one request of the new one.
            assert (answers[0], answers[-1]) == (200, 429)
            assert reload(anonymous_read=[]).status_code == 200
            assert node.http.get("/v1/messages/1", headers=asks).status_code == 200
            assert reload(anonymous_requests_per_minute=None).status_code == 200


@pytest.mark.parametrize("workers_count", [1, 2])
def test_a_stranger_s_open_stream_ends_when_what_it_reads_is_withdrawn_on_all_workers(
    postgres_stores: PostgresStores, tmp_path: Path, workers_count: int
) -> None:
    flags = two_workers(postgres_stores) if workers_count == 2 else ()
    admin = TokenFile(tokens_path(Settings(data_dir=tmp_path / "data"))).create(
        scopes=["admin", "publish"]
    )[1]
    asks = {"authorization": f"Bearer {admin}"}
    common = "drain_s = 0\ntrust_loopback = false\nanonymous_requests_per_minute = 1000\n"
    opened = f'{common}anonymous_read = ["/a/"]\n'
    with (
        serving(tmp_path, opened, *flags) as (_, url, file),
        ExitStack() as stack,
    ):

        def reload(text: str) -> float:
            file.write_text(f"{common}{text}\n")
            began_s = time.monotonic()
            answer = httpx.post(
                f"{url}/v1/reload", headers=asks, trust_env=False, auth=AS_OPERATOR, timeout=30
            )
            assert answer.json()["changed"] == ["anonymous_read"]
            return time.monotonic() - began_s

        def stream() -> Iterator[bytes]:
            # Over a connection of its own, which any worker can get.
            client = stack.enter_context(
                httpx.Client(trust_env=False, auth=AS_OPERATOR, timeout=30)
            )
            reply = stack.enter_context(client.stream("GET", f"{url}/v1/live"))
            assert reply.status_code == 200
            chunks = reply.iter_raw()
            next(chunks)
            return chunks

        streams = [stream() for _ in range(2 if workers_count == 1 else 4)]
        reload('anonymous_read = ["/a/", "/b/"]')  # more: they go on
        wider = stream()
        for number, withdrawn in ((1, [wider]), (2, streams)):
            sent = {**asks, "content-type": "application/x-protobuf"}
            publishing: dict[str, Any] = {"headers": sent, "trust_env": False, "timeout": 30}
            took_s = reload('anonymous_read = ["/a/"]' if number == 1 else "anonymous_read = []")
            assert took_s < STOPS_WITHIN_S + 1  # a loaded machine
            # The reply comes when the withdrawal holds: nothing is sent after it.
            late = encode(Message(f"late {number}", "/a/b", lamport_timestamp=1, content=b"x"))
            answer = httpx.post(f"{url}/v1/messages", content=late, **publishing)
            assert answer.status_code == 201
            for each in withdrawn:
                with pytest.raises(httpx.RemoteProtocolError):
                    assert all(b"late" not in chunk for chunk in each)
            assert number == 2 or all(b"late 1" in next(each) for each in streams)
        refused = httpx.get(f"{url}/v1/live", trust_env=False, auth=AS_OPERATOR, timeout=30)
        assert refused.status_code == 401


class EditedRules:
    """A policy in a file that changes: it refuses everything with its code. Each request has a connection."""

    setting = 'policy = "edited_rules:Closed"\n'

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self._made = folder / "edited_rules.py", folder / "made"
        self.url = ""
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def write(self, code: str) -> None:
        # The same size and second each time: a compiled file would hide the change.
        self.file.write_text(
            "import os\n"
            "from app.ingest.policy import ACCEPT, refuse\n"
            f"CODE = '{code}'\n"
            "class Closed:\n"
            "    revision = '1'\n"
            "    def __init__(self):\n"
            f"        with open({str(self._made)!r}, 'a') as file:\n"
            "            file.write(f'{CODE} {os.getpid()}\\n')\n"
            "    def __call__(self, candidate):\n"
            "        return refuse(CODE)\n"
        )

    def made(self) -> list[tuple[str, int]]:
        """The code and the process of each object that was made, since the last call."""
        if not self._made.exists():
            return []
        rows = [line.split() for line in self._made.read_text().splitlines()]
        self._made.unlink()
        return [(code, int(pid)) for code, pid in rows]

    def reload(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/reload", trust_env=False, auth=AS_OPERATOR, timeout=30)

    def verdict(self) -> str:
        frame = encode(Message("1", "c", lamport_timestamp=1, content=b"x"))
        headers = {"content-type": "application/x-protobuf"}
        answer = httpx.post(
            f"{self.url}/v1/messages",
            content=frame,
            headers=headers,
            trust_env=False,
            auth=AS_OPERATOR,
            timeout=30,
        )
        return str(answer.json()["policy_code"])

    def revision(self) -> int:
        answer = httpx.post(
            f"{self.url}/v1/recon",
            content=hello_request().SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
            trust_env=False,
            auth=AS_OPERATOR,
            timeout=30,
        )
        return ReconResponse.FromString(answer.content).policy


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EditedRules:
    return EditedRules(tmp_path, monkeypatch)


def test_a_changed_file_of_a_policy_judges_from_the_reload_on_and_a_broken_one_does_not(
    tmp_path: Path, rules: EditedRules
) -> None:
    rules.write("aaa")
    with serving(tmp_path, f"drain_s = 0\n{rules.setting}") as (node, rules.url, _):
        first = rules.revision()
        assert (rules.verdict(), set(rules.made())) == ("aaa", {("aaa", node.pid)})
        assert rules.reload().json()["changed"] == []
        assert rules.made() == []  # a policy can keep state: it is not made again for nothing
        rules.write("bbb")
        assert rules.reload().json()["changed"] == ["policy"]
        assert (rules.verdict(), rules.made()) == ("bbb", [("bbb", node.pid)])
        assert (second := rules.revision()) != first
        for broken in ("CODE = 'ccc'\nraise SystemExit", "def", "CODE = 'ddd'"):
            rules.file.write_text(broken)
            for _ in range(2):
                refused = rules.reload()
                assert (refused.status_code, refused.json()["code"]) == (422, "invalid_setting")
                assert (rules.verdict(), rules.revision()) == ("bbb", second)
        rules.file.unlink()
        assert rules.reload().status_code == 422
        rules.write("eee")
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: rules.verdict() == "eee")
        assert rules.made() == [("eee", node.pid)]


def test_new_connections_get_a_replaced_certificate_and_old_ones_go_on(
    tmp_path: Path, certificates: Certificates
) -> None:
    first = certificates.replace()
    with serving(tmp_path, "drain_s = 0\n", "--tls-cert", certificates.file) as (node, url, _):
        port = httpx.URL(url).port

        def served() -> str:
            return certificates.served(port)

        old = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=30, context=certificates.client
        )

        def ask(method: str, path: str) -> tuple[int, bytes]:
            """Over the connection that was made before all reloads."""
            old.request(method, path, headers={"authorization": f"Bearer {token_for(url)}"})
            answer = old.getresponse()
            return answer.status, answer.read()

        def changed() -> list[str]:
            status, text = ask("POST", "/v1/reload")
            assert status == 200
            names: list[str] = json.loads(text)["changed"]
            return names

        assert changed() == []
        assert ask("GET", "/livez")[0] == 200
        address = old.sock.getsockname()
        assert served() == first
        second = certificates.replace()
        assert served() == first
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: served() == second)
        assert ask("GET", "/livez")[0] == 200
        certificates.file.write_text("half a cert")
        status, text = ask("POST", "/v1/reload")
        assert (status, json.loads(text)["code"]) == (422, "invalid_setting")
        assert served() == second
        third = certificates.replace()
        assert changed() == ["tls_cert"]
        assert served() == third
        certificates.file.touch()
        assert changed() == []
        assert ask("GET", "/livez")[0] == 200
        assert old.sock.getsockname() == address
        old.close()


@pytest.mark.slow
def test_over_one_postgresql_settings_are_of_the_host_and_what_the_database_has_is_of_all(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    flags = ("--database", postgres_stores.new_url())
    text = 'drain_s = 0\nchannels = ["a"]\n'
    with ExitStack() as stack:
        nodes = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            nodes.append(stack.enter_context(serving(tmp_path / name, text, *flags)))
        (one, first, file), (_, second, _) = nodes

        def channels(url: str) -> list[str]:
            answer = httpx.get(
                f"{url}/v1/recon/interests", trust_env=False, auth=AS_OPERATOR, timeout=30
            )
            found: list[str] = answer.json()["channels"]
            return found

        def peers(url: str) -> set[str]:
            answer = httpx.get(f"{url}/v1/peers", trust_env=False, auth=AS_OPERATOR, timeout=30)
            return {each["url"] for each in answer.json()["peers"]}

        file.write_text('drain_s = 0\nchannels = ["b"]\n')
        assert cli("reload", "--node", first).out == "changed: channels\n"
        assert cli("reload", "--node", second).out == "changed: nothing\n"
        file.write_text('drain_s = 0\nchannels = ["c"]\n')
        one.send_signal(signal.SIGHUP)
        wait_until(lambda: channels(first) == ["c"])
        time.sleep(1.2 * LOOK_S)
        assert channels(second) == ["a"]
        cli("interests", "set", "--channel", "d", "--node", first)
        cli("peers", "add", "http://127.0.0.1:9", "--node", first)
        wait_until(lambda: channels(first) == channels(second) == ["d"])
        wait_until(lambda: peers(first) == peers(second) == {"http://127.0.0.1:9"})
        # An operator's interest stays, whatever host reads its settings again.
        file.write_text('drain_s = 0\nchannels = ["e"]\n')
        assert cli("reload", "--node", first).out == "changed: channels\n"
        assert cli("reload", "--node", second).out == "changed: nothing\n"
        assert channels(first) == channels(second) == ["d"]
