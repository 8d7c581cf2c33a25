"""Settings are read again on SIGHUP and over HTTP; what takes a restart is named."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography import x509

from app.federation.peers import LOOK_S
from app.reload import CHANGEABLE
from app.settings import Settings
from app.tokens import TokenFile, tokens_path
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import cli, command
from tests.support.server import running_node

SECONDS_MAX = 60


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


def test_every_changeable_setting_exists() -> None:
    assert set(Settings.model_fields) > CHANGEABLE


def test_a_reload_takes_over_what_can_change_and_names_the_rest(tmp_path: Path) -> None:
    text = 'drain_s = 0\nchannels = ["a"]\npeers = ["http://127.0.0.1:1"]\n'
    with serving(tmp_path, text) as (node, url, file):

        def get(path: str) -> dict[str, object]:
            document: dict[str, object] = httpx.get(
                f"{url}{path}", trust_env=False, timeout=30
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
        answer = httpx.post(f"{url}/v1/reload", trust_env=False, timeout=30)
        assert answer.json() == {
            "changed": ["peers", "channels", "log_level"],
            "needs_restart": ["cors_origins"],
        }
        assert get("/v1/recon/interests")["channels"] == ["b"]
        wait_until(lambda: set(peer_urls()) == {"http://127.0.0.1:2", "http://127.0.0.1:3"})
        preflight = {"origin": "http://x", "access-control-request-method": "GET"}
        assert (
            httpx.options(f"{url}/v1/info", headers=preflight, trust_env=False).status_code != 200
        )
        file.write_text('drain_s = 0\nchannels = ["c"]\npeers = []\nno_such = 1\n')
        refused = httpx.post(f"{url}/v1/reload", trust_env=False, timeout=30)
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
    assert "settings read again: peers, channels, log_level" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("way", ["signal", "http"])
def test_all_workers_take_part(tmp_path: Path, way: str) -> None:
    with serving(tmp_path, 'drain_s = 0\nchannels = ["a"]\n', "--workers", 2) as (node, url, file):

        def channels() -> set[str]:
            """What the workers say; each new connection can reach another one."""
            found = set()
            for _ in range(12):
                answer = httpx.get(f"{url}/v1/recon/interests", trust_env=False, timeout=30)
                found |= set(answer.json()["channels"])
            return found

        assert channels() == {"a"}
        file.write_text('drain_s = 0\nchannels = ["b"]\n')
        if way == "signal":
            node.send_signal(signal.SIGHUP)
        else:
            assert httpx.post(f"{url}/v1/reload", trust_env=False, timeout=30).json()[
                "changed"
            ] == ["channels"]
        wait_until(lambda: channels() == {"b"})
        assert node.poll() is None


def test_a_policy_rates_and_what_strangers_may_do_change_in_a_running_node(tmp_path: Path) -> None:
    (tmp_path / "reload_rules.py").write_text(
        "from app.policy import ACCEPT, refuse\n"
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
                return node.http.get("/v1/recon/interests", headers=asks).headers["sds-policy"]

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
            changed = reload(stranger_requests_per_minute=2).json()["changed"]
            assert changed == ["stranger_requests_per_minute"]
            answers = [node.http.get("/v1/messages/1").status_code for _ in range(3)]
            assert answers == [200, 200, 429]
            assert reload(anonymous_read=[]).status_code == 200
            assert node.http.get("/v1/messages/1", headers=asks).status_code == 200
            assert reload(stranger_requests_per_minute=None).status_code == 200


def test_new_connections_get_a_replaced_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    certificate = tmp_path / "node.pem"

    def replace_certificate() -> str:
        """Put a new certificate in the place of the old one; its serial number."""
        made = authority.issue_cert("127.0.0.1")
        new = tmp_path / "new.pem"
        made.private_key_and_cert_chain_pem.write_to_path(new)
        new.replace(certificate)
        number: int = x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number
        return f"{number:X}"

    first = replace_certificate()
    with serving(tmp_path, "drain_s = 0\n", "--tls-cert", certificate) as (node, url, _):
        port = httpx.URL(url).port

        def served() -> str:
            """The serial number of the certificate that a new connection gets."""
            with (
                socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
                tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                found = connection.getpeercert()
                assert found is not None
                return str(found["serialNumber"]).lstrip("0")

        old = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=tls)

        def ask(method: str, path: str) -> tuple[int, bytes]:
            """Over the connection that was made before all reloads."""
            old.request(method, path)
            answer = old.getresponse()
            return answer.status, answer.read()

        assert ask("GET", "/livez")[0] == 200
        address = old.sock.getsockname()
        assert served() == first
        second = replace_certificate()
        assert served() == first
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: served() == second)
        assert ask("GET", "/livez")[0] == 200
        certificate.write_text("half a cert")
        status, text = ask("POST", "/v1/reload")
        assert (status, json.loads(text)["code"]) == (422, "invalid_setting")
        assert served() == second
        third = replace_certificate()
        assert ask("POST", "/v1/reload")[0] == 200
        assert served() == third
        assert ask("GET", "/livez")[0] == 200
        assert old.sock.getsockname() == address
        old.close()


@pytest.mark.slow
def test_workers_take_over_a_policy_and_each_of_them_releases_and_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker_rules.py").write_text(
        "from app.policy import quarantine\n"
        "class Hold:\n    revision = '1'\n    def __call__(self, candidate):\n"
        "        return quarantine('held')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(tmp_path, "drain_s = 0\n", "--workers", 2) as (node, url, file):

        def ask(method: str, path: str, **sent: Any) -> httpx.Response:
            """Over a new connection, which can reach either worker."""
            return httpx.request(method, f"{url}{path}", trust_env=False, timeout=30, **sent)

        def publish(number: int) -> tuple[int, str]:
            frame = encode(Message(f"{number}", "c", lamport_timestamp=1, content=b"x"))
            headers = {"content-type": "application/x-protobuf"}
            answer = ask("POST", "/v1/messages", content=frame, headers=headers)
            return answer.status_code, answer.json().get("code", "")

        assert publish(0)[0] == 201
        file.write_text('drain_s = 0\npolicy = "worker_rules:Missing"\n')
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: "stay as they are" in (tmp_path / "log").read_text())
        assert publish(1)[0] == 201
        file.write_text('drain_s = 0\npolicy = "worker_rules:Hold"\n')
        assert ask("POST", "/v1/reload").json()["changed"] == ["policy"]
        numbers = iter(range(2, 1_000))
        wait_until(lambda: publish(next(numbers)) == (403, "quarantined"))
        for _ in range(8):
            assert publish(next(numbers)) == (403, "quarantined")
        held = ask("GET", "/v1/quarantine").json()["messages"]
        for at, each in enumerate(held):
            path = f"/v1/quarantine/{each['digest']}"
            if at % 2:
                assert ask("DELETE", path).status_code == 204
            else:
                assert ask("POST", f"{path}/release").json()["outcome"] == "stored"
            is_here = ask("GET", f"/v1/messages/{each['message_id']}").status_code == 200
            assert is_here is not bool(at % 2)
            assert ask("GET", path).status_code == 404
        assert ask("GET", "/v1/quarantine").json()["messages"] == []
        dropped = int(held[1]["message_id"])
        assert publish(dropped) == (403, "policy_refused")
