"""Settings that change while a node runs: on SIGHUP, and over HTTP."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from cryptography import x509

from app.errors import SettingsError
from app.federation.interests import interest_of
from app.ingest.policy import LoadedPolicy, load_policy
from app.server.logs import set_level
from app.server.node import Certificate, Node
from app.server.settings import Settings

CHANGEABLE = frozenset(
    {
        "peers",
        "sync_interval_s",
        "channels",
        "channel_prefixes",
        "lamport_from",
        "lamport_to",
        "private_peers",
        "drain_s",
        "peer_ca",
        "peer_token_files",
        "tls_cert",
        "tls_key",
        "log_level",
        "policy",
        "anonymous_read",
        "anonymous_publish",
        "caller_requests_per_minute",
        "caller_bytes_per_minute",
        "stranger_requests_per_minute",
        "stranger_bytes_per_minute",
    }
)
"""The settings that a running node takes over; all others take a restart."""

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What a process runs with: its settings, their policy and their certificate."""

    settings: Settings
    policy: LoadedPolicy | None
    certificate: Certificate | None


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload found: names of settings that it took over, and of those that take a restart."""

    changed: list[str]
    needs_restart: list[str]


def reload_settings(node: Node) -> Reloaded:
    """Read the settings again and take over what can change. Raises SettingsError; then nothing changes.

    The access tokens and the files of the node's certificate are read again, too.
    """
    (settings, policy, certificate), found = merged(
        Loaded(node.settings, node.policy, node.certificate)
    )
    node.settings, node.certificate = settings, certificate
    warn_of(certificate)
    if policy is not node.policy:
        node.take_policy(policy)
    node.rates.configure(settings)
    for listener in node.reload_listeners:
        listener(settings)
    node.strangers.configure(settings)
    set_level(settings.log_level)
    if node.tls is not None:
        load_certificate(node.tls, settings)
    node.interests.configure(interest_of(settings))
    node.peers.configure(settings)
    node.tokens.look()
    log_reload(found)
    return found


def merged(loaded: Loaded) -> tuple[Loaded, Reloaded]:
    """`loaded` with what changed in the sources of the settings and can change.

    The policy is the same object unless its name or its code changed. Raises SettingsError.
    """
    current, fresh = loaded.settings, loaded.settings.read_again()
    different = {
        name for name in Settings.model_fields if getattr(fresh, name) != getattr(current, name)
    }
    policy = None if fresh.policy is None else load_policy(fresh.policy, loaded.policy)
    if loaded.policy is not None and policy is not loaded.policy:
        different.add("policy")
    fixed = different - CHANGEABLE
    if (fresh.tls_cert is None) is not (current.tls_cert is None):
        fixed |= different & {"tls_cert", "tls_key"}  # from http to https or back
    changed = different - fixed
    settings = current.model_copy(update={name: getattr(fresh, name) for name in changed})
    certificate = checked_certificate(settings)
    if certificate != loaded.certificate:
        old = loaded.certificate
        if certificate is not None and certificate.is_expired and old and not old.is_expired:
            raise SettingsError(f"{certificate.expiry}; the node keeps its valid one")
        changed.add("tls_cert")
    return Loaded(settings, policy, certificate), Reloaded(_in_order(changed), _in_order(fixed))


def _in_order(names: Collection[str]) -> list[str]:
    return [name for name in Settings.model_fields if name in names]


def log_reload(found: Reloaded) -> None:
    """Name what changed; never a value, which can be a secret."""
    _log.info("settings read again: %s", ", ".join(found.changed) or "nothing changed")
    if found.needs_restart:
        _log.warning("not before a restart: %s", ", ".join(found.needs_restart))


def load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Load the certificate of the settings, if they have one. Raises SettingsError."""
    if settings.tls_cert is None:
        return
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        key = f"tls_key {settings.tls_key}"
        if settings.tls_key is None:
            key = "no tls_key, so the file must contain the key too"
        detail = f"tls_cert {settings.tls_cert}, {key}: {error.strerror or error}"
        raise SettingsError(detail) from None


def checked_certificate(settings: Settings) -> Certificate | None:
    """Check that the certificate can be loaded; None if there is none. Raises SettingsError."""
    if settings.tls_cert is None:
        return None
    try:
        content = settings.tls_cert.read_bytes()
    except OSError as error:
        raise SettingsError(f"tls_cert {settings.tls_cert}: {error.strerror or error}") from None
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)
    try:
        chain = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise SettingsError(f"tls_cert {settings.tls_cert}: {error}") from None
    not_after_s = min(each.not_valid_after_utc.timestamp() for each in chain)
    return Certificate(sha256(content).digest(), not_after_s, settings.tls_cert)


def warn_of(certificate: Certificate | None) -> None:
    """Log that a certificate has expired, if it has."""
    if certificate is not None and certificate.is_expired:
        _log.warning("%s: callers refuse it", certificate.expiry)
