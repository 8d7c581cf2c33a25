"""Settings that change while a node runs: on SIGHUP, and over HTTP."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass

from app.errors import SettingsError
from app.interests import interest_of
from app.logs import set_level
from app.node import Node
from app.policy import LoadedPolicy, load_policy
from app.settings import Settings

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


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload found: names of settings that it took over, and of those that take a restart."""

    changed: list[str]
    needs_restart: list[str]


def reload_settings(node: Node) -> Reloaded:
    """Read the settings again and take over what can change. Raises SettingsError; then nothing changes.

    The access tokens and the files of the node's certificate are read again, too.
    """
    settings, found, policy = merged(node.settings, node.policy)
    if settings.tls_cert is not None:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)
    node.settings = settings
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


def merged(
    current: Settings, loaded: LoadedPolicy | None
) -> tuple[Settings, Reloaded, LoadedPolicy | None]:
    """The settings with what changed in their sources and can change, and their policy.

    That is `loaded`, unless its name or its code changed. Raises SettingsError.
    """
    fresh = current.read_again()
    policy = None if fresh.policy is None else load_policy(fresh.policy, loaded)
    has_new_code = loaded is not None and policy is not loaded
    different = [
        name
        for name in Settings.model_fields
        if getattr(fresh, name) != getattr(current, name) or (name == "policy" and has_new_code)
    ]
    fixed = set(different) - CHANGEABLE
    if (fresh.tls_cert is None) is not (current.tls_cert is None):
        fixed |= {"tls_cert", "tls_key"}  # from http to https or back
    changed = [name for name in different if name not in fixed]
    found = Reloaded(changed, [name for name in different if name in fixed])
    settings = current.model_copy(update={name: getattr(fresh, name) for name in changed})
    return settings, found, policy


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
