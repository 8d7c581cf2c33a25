"""Settings: four layers, and no word that is not understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import SettingsError
from app.server.settings import Settings, load_settings


def test_each_layer_wins_over_those_before_it(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('port = 1\nhost = "::1"\nlog_level = "error"\n')
    settings, provenance = load_settings(
        file, {"port": 3, "host": None}, {"SDSTORE_PORT": "2", "SDSTORE_HOST": "localhost"}
    )
    assert (settings.port, settings.host, settings.log_level) == (3, "localhost", "error")
    assert provenance["port"] == "flag"
    assert provenance["host"] == "environment"
    assert provenance["log_level"] == f"file {file}"
    assert provenance["workers"] == "default"


@pytest.mark.parametrize(
    ("flags", "environment", "toml"),
    [
        ({"prot": 1}, {}, ""),
        ({}, {"SDSTORE_PROT": "1"}, ""),
        ({}, {}, "prot = 1"),
    ],
)
def test_an_unknown_name_is_an_error_in_every_layer(
    flags: dict[str, Any], environment: dict[str, str], toml: str, tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(toml)
    with pytest.raises(SettingsError, match="prot"):
        load_settings(file, flags, environment)


def test_variables_of_the_test_suite_are_no_settings() -> None:
    load_settings(None, {}, {"SDSTORE_TEST_POSTGRES_URL": "x", "HOME": "/"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65_536),
        ("port", "http"),
        ("sync_interval_s", 0),
        ("workers", 0),
        ("log_level", "loud"),
        ("database_url", "oracle://x"),
        ("log_format", "xml"),
        ("peers", ["http://good.example", "ftp://store.example"]),
        ("peers", ["http://xn--a"]),
        ("public_url", "store.example"),
        ("public_url", "https://user@store.example"),
        ("public_url", "https://store.example/?a"),
        ("public_url", "https://store.example/>; rel=x"),
        ("trusted_proxies", ["10.0.0.1/8"]),
        ("trusted_proxies", ["proxy.example"]),
        ("trusted_proxies", ["::ffff:10.0.0.1"]),
    ],
)
def test_a_wrong_value_is_told_with_its_name_and_layer(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} \(flag\): "):
        load_settings(None, {name: value}, {})


@pytest.mark.parametrize("text", ["port = ", "\x00", "[port]\nx = 1"])
def test_a_file_that_is_no_settings_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(SettingsError):
        load_settings(file, {}, {})


def test_lists_are_written_with_commas_in_the_environment() -> None:
    settings, _ = load_settings(None, {}, {"SDSTORE_PEERS": "http://a, http://b,"})
    assert settings.peers == ["http://a", "http://b"]


def test_the_database_lies_in_the_data_folder_unless_told() -> None:
    assert Settings(data_dir=Path("/x")).database_url == "sqlite:////x/sdstore.db"
    assert Settings(data_dir=Path("/x"), database_url="sqlite:///y.db").database_url.endswith(
        "y.db"
    )


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("", False),
        ("example.org", False),
    ],
)
def test_private_peers_are_allowed_while_only_this_machine_can_ask(
    host: str, is_loopback: bool
) -> None:
    assert Settings(host=host).is_loopback is is_loopback
    assert Settings(host=host).allows_private_peers is is_loopback
    assert Settings(host=host, private_peers=True).allows_private_peers
    assert not Settings(host=host, private_peers=False).allows_private_peers


def test_loopback_is_no_credential_where_a_proxy_or_a_public_url_is_declared() -> None:
    assert load_settings(None, {}, {})[0].trusts_loopback
    for name, value in (("public_url", "https://store.example/"), ("trusted_proxies", "::1")):
        assert not load_settings(None, {}, {f"SDSTORE_{name.upper()}": value})[0].trusts_loopback
    with pytest.raises(SettingsError, match="trust_loopback"):
        load_settings(None, {"trust_loopback": True, "trusted_proxies": ["10.0.0.1"]}, {})
