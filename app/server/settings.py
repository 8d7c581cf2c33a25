"""The operator's settings, and the source of each value.

There are four layers, and later ones win: defaults, a TOML file, `SDSTORE_*` environment variables,
command-line flags. An unknown key is an error in every layer, so a misspelt one is never ignored.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

from app.access.proxies import check_proxies
from app.errors import Problem, SettingsError, fault_text

ENVIRONMENT_PREFIX = "SDSTORE_"
# Variables of the test suite, the benchmarks and the verbs that call a node; never settings of a node.
FOREIGN_PREFIXES = ("SDSTORE_TEST_", "SDSTORE_BENCH_", "SDSTORE_CLIENT_")

# RFC 3986. A link in angle brackets can contain them all.
_URL_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/%@!$&'()*+,;=\[\]-]+")
_PASSWORD = re.compile(r"(?<=[?&]password=)[^&]*|(?<=:)[^:/@?]*(?=@)")


def _split_commas(value: object) -> object:
    """The environment gives lists as "a,b", the other layers as lists."""
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


def _split_pairs(value: object) -> object:
    """The environment and flags give pairs as "a=b,c=d", a TOML file as a table."""
    parts = _split_commas(value)
    if not isinstance(parts, list):
        return parts
    # The last "=": a URL can contain one, a file of a token seldom does.
    pairs = [str(part).rpartition("=") for part in parts]
    if not all(name and path for name, _, path in pairs):
        raise ValueError("each is URL=FILE")
    return {name: path for name, _, path in pairs}


TokenFiles = Annotated[dict[str, Path], BeforeValidator(_split_pairs)]
CommaList = Annotated[list[str], BeforeValidator(_split_commas)]
RETENTION_RULES_MAX = 100


class RetentionRule(BaseModel):
    """What a node keeps of each channel that the rule covers; without a bound, everything.

    Without channels and prefixes it covers every channel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    channels: list[str] = []
    channel_prefixes: list[str] = []
    max_age_s: float | None = Field(None, gt=0, le=10**10)
    max_count: int | None = Field(None, ge=0, lt=2**63)
    max_bytes: int | None = Field(None, ge=0, lt=2**63)

    def covers(self, channel_id: str) -> bool:
        """Whether the rule is about a channel, if none before it is."""
        is_named = channel_id in self.channels or channel_id.startswith(
            tuple(self.channel_prefixes)
        )
        return is_named or not (self.channels or self.channel_prefixes)

    @property
    def keeps_all(self) -> bool:
        """Whether it has no bound."""
        return (self.max_age_s, self.max_count, self.max_bytes) == (None, None, None)


def _read_json(value: object) -> object:
    """The environment gives tables as JSON, a TOML file as they are."""
    return json.loads(value) if isinstance(value, str) else value


def _public_url(text: str) -> str:
    """The URL without the slash at its end."""
    url = urlsplit(text)
    is_plain = not (url.query or url.fragment or "@" in url.netloc or url.path.count("//"))
    if url.scheme not in ("http", "https") or not url.hostname or not is_plain:
        raise ValueError("it is http(s)://HOST[:PORT][/PATH]")
    if not _URL_CHARACTERS.fullmatch(text):
        raise ValueError("it contains characters that a URL cannot have")
    _ = url.port  # raises ValueError
    return text.rstrip("/")


def _check_proxies(trusted: list[str]) -> list[str]:
    check_proxies(trusted)
    return trusted


PublicUrl = Annotated[str, AfterValidator(_public_url)]


def _database_below(values: dict[str, Any]) -> str:
    return f"sqlite:///{values.get('data_dir', Path('data'))}/sdstore.db"


class Settings(BaseModel):
    """The settings of one node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(Path("data"), description="folder of all data of this node")
    database_url: str = Field(
        default_factory=_database_below,
        pattern=r"^(sqlite:///|postgresql://)",
        description="sqlite:///PATH or postgresql://…",
    )
    peers: CommaList = Field(
        [],
        description="URLs of the stores to sync with; a name can be unresolvable at start",
    )
    sync_interval_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="longest pause between two syncs with a healthy peer, in seconds",
    )
    channels: CommaList = Field(
        [], description="channels to sync; if there are no prefixes either: every channel"
    )
    channel_prefixes: CommaList = Field([], description="prefixes of channels to sync")
    lamport_from: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="lowest Lamport timestamp to sync; unset: no bound",
    )
    lamport_to: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="first Lamport timestamp above those to sync; unset: no bound",
    )
    private_peers: bool | None = Field(
        None,
        description="allow peers with private addresses; "
        "unset: only while this node listens on loopback",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that serve one PostgreSQL database; SQLite is served by one",
    )
    drain_s: float = Field(
        3.0,
        ge=0,
        le=600,
        description="seconds from SIGTERM, when /readyz changes to 503, until the listener closes",
    )
    tokens_file: Path | None = Field(
        None, description="file with the access tokens; unset: tokens.json in data_dir"
    )
    tls_cert: Path | None = Field(
        None, description="file with this node's certificate and its chain (PEM): serve https"
    )
    tls_key: Path | None = Field(
        None, description="file with the key of tls_cert (PEM); unset: it is in tls_cert"
    )
    peer_ca: Path | None = Field(
        None,
        description="file with the CA certificates of the peers (PEM); unset: the well-known ones",
    )
    peer_token_files: TokenFiles = Field(
        {},
        description="URL=FILE for each peer that demands an access token; it is read at each sync",
    )
    trust_loopback: bool | None = Field(
        None,
        description="serve callers on this machine without a token; false: all need one; "
        "unset: unless there is a public_url or a trusted proxy",
    )
    public_url: PublicUrl | None = Field(
        None,
        description="URL by which callers reach this node through a proxy; links in replies begin with it",
    )
    trusted_proxies: Annotated[CommaList, AfterValidator(_check_proxies)] = Field(
        [],
        description="addresses or networks of proxies, which say from where and by which scheme they were "
        "called",
    )
    proxy_header: Literal["x-forwarded-for", "forwarded"] = Field(
        "x-forwarded-for",
        description="the header in which trusted proxies name the client's address",
    )
    insecure: bool = Field(
        False,
        description="listen beyond loopback, and serve callers without a token all but the operator's routes",
    )
    anonymous_read: CommaList = Field(
        [],
        description="prefixes of channels that callers without a token can read; * is every channel",
    )
    anonymous_publish: CommaList = Field(
        [],
        description="prefixes of channels that callers without a token can publish in; * is every channel",
    )
    bound_senders: CommaList = Field(
        [],
        description="prefixes of channels in which callers write only as senders that their token is bound to; "
        "* is every channel",
    )
    caller_requests_per_minute: int | None = Field(
        None,
        ge=1,
        le=10**15,
        description="requests of one token in a minute, or of one address with insecure; "
        "unset: the bound of this name",
    )
    caller_bytes_per_minute: int | None = Field(
        None,
        ge=1,
        le=10**15,
        description="bytes of bodies and replies of one token in a minute, or of one address with insecure; "
        "unset: the bound of this name",
    )
    anonymous_requests_per_minute: int | None = Field(
        None,
        ge=1,
        le=10**15,
        description="requests of one address without credentials in a minute; "
        "unset: the bound of this name",
    )
    anonymous_bytes_per_minute: int | None = Field(
        None,
        ge=1,
        le=10**15,
        description="bytes of bodies and replies of one address without credentials in a minute; "
        "unset: the bound of this name",
    )
    policy: str | None = Field(
        None,
        description="PACKAGE.MODULE:NAME, or an entry point of the group sdstore.policy: it accepts, "
        "refuses or quarantines each message",
    )
    retention: Annotated[list[RetentionRule], BeforeValidator(_read_json)] = Field(
        [],
        max_length=RETENTION_RULES_MAX,
        description="tables with `channels` or `channel_prefixes` (neither: every channel) and `max_age_s`, "
        "`max_count` or `max_bytes` for each such channel: what is beyond is retired, the oldest first; the first "
        "rule that covers a channel holds",
    )
    disk_free_min_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="bytes free on the disk below which the node takes no messages; 0 switches this off",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest severity that is logged"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="form of a log line: text for people, or a JSON object"
    )
    fast_lane: bool = Field(
        True,
        description="call the hottest routes without the web framework; false: all by the framework, "
        "with the same replies and more time",
    )
    cors_origins: CommaList = Field(
        [],
        description="web origins whose pages can read, publish and reconcile here; * is every page, "
        "on loopback every page that a browser of this machine opens",
    )

    _config_file: Path | None = PrivateAttr(None)
    _flags: dict[str, Any] | None = PrivateAttr(None)

    def read_again(self) -> Settings:
        """The settings that the same file, environment and flags give now. Raises SettingsError."""
        if self._flags is None:  # they were not loaded
            return self
        return load_settings(self._config_file, self._flags)[0]

    @property
    def shown_database_url(self) -> str:
        """The database's URL without its password, in either place."""
        if self.database_url.startswith("sqlite:"):
            return self.database_url
        return _PASSWORD.sub("***", self.database_url)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the node."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def trusts_loopback(self) -> bool:
        """Whether callers on this machine need no token: behind a proxy every caller seems to be one."""
        if self.trust_loopback is None:
            return not (self.public_url or self.trusted_proxies)
        return self.trust_loopback

    @property
    def disk_folder(self) -> Path:
        """The folder on the disk that messages fill, if it is this machine's."""
        if self.database_url.startswith("sqlite:///"):
            return Path(self.database_url.removeprefix("sqlite:///")).parent
        return self.data_dir

    @property
    def public_host(self) -> bytes:
        """Host and port in the public URL; empty without one."""
        return urlsplit(self.public_url or "").netloc.encode()

    @property
    def allows_private_peers(self) -> bool:
        """Whether a peer can have a private address."""
        return self.is_loopback if self.private_peers is None else self.private_peers


def load_settings(
    config_file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """The settings, and for each name the layer it came from.

    `flags` contains the flags (None means absent); `environment` defaults to os.environ. Raises
    SettingsError.
    """
    layers: dict[str, dict[str, Any]] = {
        f"file {config_file}": _from_file(config_file),
        "environment": _from_environment(os.environ if environment is None else environment),
        "flag": {name: value for name, value in (flags or {}).items() if value is not None},
    }
    merged: dict[str, Any] = {}
    provenance = dict.fromkeys(Settings.model_fields, "default")
    for layer, values in layers.items():
        merged |= values
        provenance |= dict.fromkeys(values, layer)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(_first_fault(error, provenance)) from None
    _check_data_dir(settings, provenance["data_dir"])
    if settings.peers:
        _check_peers(settings, provenance["peers"])
    if settings.trust_loopback and settings.trusted_proxies:
        raise SettingsError(
            f"trust_loopback ({provenance['trust_loopback']}): behind a proxy every caller needs a token"
        )
    _check_interest(settings)
    if settings.tls_key and not settings.tls_cert:
        raise SettingsError(f"tls_key ({provenance['tls_key']}): it needs tls_cert")
    settings._config_file = config_file  # noqa: SLF001 - of this module
    settings._flags = dict(flags or {})  # noqa: SLF001
    return settings, provenance


def _check_data_dir(settings: Settings, layer: str) -> None:
    folder = settings.data_dir
    existing = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if existing.exists() and not existing.is_dir():
        raise SettingsError(f"data_dir ({layer}): {str(existing)!r} is not a folder")


def _check_peers(settings: Settings, layer: str) -> None:
    from app.federation.client import parse_peer_url, refuse_literal  # noqa: PLC0415 - brings httpx

    for text in settings.peers:
        try:
            url = parse_peer_url(text)
            refuse_literal(url, private_allowed=settings.allows_private_peers)
        except Problem as problem:
            raise SettingsError(f"peers ({layer}): {text!r}: {problem.detail}") from None


def _check_interest(settings: Settings) -> None:
    names = ("channels", "channel_prefixes", "lamport_from", "lamport_to")
    if not settings.model_fields_set & set(names):
        return
    from app.federation.interests import check_interest, interest_of  # noqa: PLC0415 - brings the store
    from app.server.limits import DEFAULT_LIMITS  # noqa: PLC0415

    try:
        check_interest(interest_of(settings), DEFAULT_LIMITS)
    except Problem as problem:
        raise SettingsError(f"{', '.join(names)}: {problem.detail}") from None


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"{path}: {reason}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(FOREIGN_PREFIXES)
    }


def _first_fault(error: ValidationError, provenance: Mapping[str, str]) -> str:
    fault = error.errors(include_url=False)[0]
    name = str(fault["loc"][0])
    what = "no such setting" if fault["type"] == "extra_forbidden" else fault_text(fault)
    # Within a table: its place in the list and the key.
    place = "".join(f".{each}" for each in fault["loc"][1:]) if len(fault["loc"]) > 2 else ""
    return f"{name}{place} ({provenance[name]}): {what}"
