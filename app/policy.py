"""An operator's own policy: a Python object that accepts, refuses or quarantines each message.

    class NoSpam:
        revision = "2026-05-01"

        def __call__(self, candidate: Candidate) -> Verdict:
            if b"casino" in (candidate.message.content or b""):
                return quarantine("mentions a casino")
            return ACCEPT

The setting `policy` names it: `package.module:name`, or the name of an entry point of the group
`sdstore.policy`. A class is called without arguments. `app.ingest.judge` calls the policy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol

from app.errors import SettingsError
from sdstore.sds.model import Message

GROUP = "sdstore.policy"
REVISION_CHARACTERS_MAX = 256


class Way(StrEnum):
    """How a message came."""

    HTTP = "http"
    BATCH = "batch"
    RECON = "recon"
    """Pushed by a peer, in a session that the peer started."""
    SYNC = "sync"
    """Fetched from a peer, in a session that this node started."""
    MVDS = "mvds"
    RELAY = "relay"
    """A sync or ephemeral message that a connected store passes on."""


class Candidate(NamedTuple):
    """A message that passed all checks of the store. `is_content` is False for one to relay only.

    `digest` is that of the entry (32 bytes; empty if there is none); `id_verifies` says that the message
    ID matches the content by a known scheme.
    """

    message: Message
    frame: bytes
    digest: bytes
    id_verifies: bool
    is_content: bool
    way: Way


class Action(StrEnum):
    """What happens to a message."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An action; `code` (a-z, 0-9, _) and `detail` are shown to the publisher, or to the operator."""

    action: Action
    code: str = ""
    detail: str = ""


ACCEPT = Verdict(Action.ACCEPT)

_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def refuse(code: str, detail: str = "") -> Verdict:
    """The publisher gets `policy_refused` with this code as the member `policy_code`."""
    if not _CODE.fullmatch(code):
        raise ValueError(f"a code has 1 to 64 characters of a-z, 0-9 and _: {code[:80]!r}")
    return Verdict(Action.REFUSE, code, detail[:1_000])


def quarantine(reason: str = "") -> Verdict:
    """The message is kept apart until an operator releases or drops it."""
    return Verdict(Action.QUARANTINE, detail=reason[:1_000])


class Policy(Protocol):
    """Called for one message at a time, by one thread. It can keep state, and must answer quickly."""

    @property
    def revision(self) -> str:
        """Changes with every change of the rules: then peers offer refused messages again."""
        ...

    def __call__(self, candidate: Candidate) -> Verdict:
        """The verdict on a message."""
        ...


def load_policy(name: str) -> Policy:
    """The policy that the setting names. Raises SettingsError."""
    try:
        found = _found(name)
        policy: Any = found() if isinstance(found, type) else found
    except Exception as error:  # whatever code of the operator raises
        detail = f"policy: {name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise SettingsError(detail) from error
    revision = getattr(policy, "revision", None)
    if not callable(policy) or not isinstance(revision, str):
        raise SettingsError(f"policy: {name!r} is not callable, or has no revision (a text)")
    if len(revision) > REVISION_CHARACTERS_MAX:
        raise SettingsError(f"policy: a revision has at most {REVISION_CHARACTERS_MAX} characters")
    loaded: Policy = policy
    return loaded


def _found(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        points = list(entry_points(group=GROUP, name=name))
        if len(points) != 1:
            raise LookupError(f"{len(points)} entry points of the group {GROUP} have this name")
        return points[0].load()
    owner: object = import_module(module)
    for part in attribute.split("."):
        owner = getattr(owner, part)
    return owner
