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
import sys
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from app.errors import SettingsError
from sdstore.sds.model import Message

GROUP = "sdstore.policy"
REVISION_CHARACTERS_MAX = 256
DETAIL_CHARACTERS_MAX = 1_000
"""Of a verdict: a publisher gets it in the reply, and the quarantine keeps it."""


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
    """An action; `code` (a-z, 0-9, _) and `detail` are shown to the publisher, or to the operator.

    `code` is needed to refuse, and has up to 64 characters; `detail` is cut to `DETAIL_CHARACTERS_MAX`.
    """

    action: Action
    code: str = ""
    detail: str = ""


ACCEPT = Verdict(Action.ACCEPT)

_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def refuse(code: str, detail: str = "") -> Verdict:
    """The publisher gets `policy_refused` with this code as the member `policy_code`."""
    return checked_verdict(Verdict(Action.REFUSE, code, detail))


def quarantine(reason: str = "") -> Verdict:
    """The message is kept apart until an operator releases or drops it."""
    return checked_verdict(Verdict(Action.QUARANTINE, detail=reason))


def checked_verdict(returned: object) -> Verdict:
    """What a policy returned, with a detail that can be shown. Raises TypeError or ValueError if it is no verdict."""
    if not isinstance(returned, Verdict):
        raise TypeError(f"{type(returned).__name__} is not a Verdict")
    action, code, detail = Action(returned.action), returned.code, returned.detail
    if not (isinstance(code, str) and isinstance(detail, str)):
        raise TypeError("the code and the detail of a verdict must be str")
    if action is Action.REFUSE and not _CODE.fullmatch(code):
        raise ValueError(f"the code {code[:80]!r} is not 1 to 64 characters of a-z, 0-9 and _")
    shown = detail[:DETAIL_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    return Verdict(action, code, shown)


class Policy(Protocol):
    """Called for one message at a time, by one thread. It can keep state, and must answer quickly."""

    @property
    def revision(self) -> str:
        """Changes with every change of the rules: then peers offer refused messages again."""
        ...

    def __call__(self, candidate: Candidate) -> Verdict:
        """The verdict on a message."""
        ...


class LoadedPolicy(NamedTuple):
    """A policy, the setting that names it, and the source of its module (None: it is not from a file).

    `revision` is the policy's own with the hash of the source: other code has another revision.
    """

    rules: Policy
    revision: str
    name: str
    source: bytes | None


_sources: dict[str, bytes] = {}
"""The source of each module that was run for a policy. There are as many as the operator has named."""


def load_policy(name: str, loaded: LoadedPolicy | None = None) -> LoadedPolicy:
    """The policy that the setting names: `loaded`, if neither the name nor the file of its module changed.

    A changed file is run again. If that fails, the old module stays. Raises SettingsError.
    """
    try:
        module, path = _place(name)
        source = _source(module)
        if loaded is not None and (loaded.name, loaded.source) == (name, source):
            return loaded
        found: Any = _module(module, source)
        for part in path.split("."):
            found = getattr(found, part)
        rules: Any = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:  # whatever code of the operator raises
        detail = f"policy: {name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise SettingsError(detail) from error
    revision = getattr(rules, "revision", None)
    if not callable(rules) or not isinstance(revision, str):
        raise SettingsError(f"policy: {name!r} is not callable, or has no revision (a text)")
    if len(revision) > REVISION_CHARACTERS_MAX:
        raise SettingsError(f"policy: a revision has at most {REVISION_CHARACTERS_MAX} characters")
    if source is not None:
        revision = f"{revision} {sha256(source).hexdigest()}"
    return LoadedPolicy(rules, revision, name, source)


def _place(name: str) -> tuple[str, str]:
    """The module of a policy, and the path to it inside. Raises LookupError."""
    module, colon, path = name.partition(":")
    if colon:
        return module, path
    points = list(entry_points(group=GROUP, name=name))
    if len(points) != 1:
        raise LookupError(f"{len(points)} entry points of the group {GROUP} have this name")
    return points[0].module, points[0].attr


def _source(name: str) -> bytes | None:
    """What the file of a module contains now; None for a module that is not a source file."""
    invalidate_caches()  # a file that was made a moment ago
    spec = _spec(name)
    if isinstance(spec.loader, SourceFileLoader) and spec.origin is not None:
        return spec.loader.get_data(spec.origin)
    return None


def _spec(name: str) -> ModuleSpec:
    known = sys.modules.get(name)
    spec = find_spec(name) if known is None else known.__spec__
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


def _module(name: str, source: bytes | None) -> ModuleType:
    """The module, run again if its source is not the one that was run."""
    old = sys.modules.get(name)
    if source is None:
        return import_module(name)
    if old is not None and _sources.setdefault(name, source) == source:
        return old
    spec = _spec(name)
    fresh = module_from_spec(spec)
    sys.modules[name] = fresh
    try:
        # Not by the loader: it trusts a compiled file if size and time, in seconds, are those of the source.
        code = compile(source, str(spec.origin), "exec", dont_inherit=True)
        exec(code, vars(fresh))  # noqa: S102 - as an import does
    except BaseException:
        del sys.modules[name]
        if old is not None:
            sys.modules[name] = old  # what runs goes on with its own module
        raise
    _sources[name] = source
    return fresh
