"""Access tokens: credentials with scopes and channels, in a file that every process of a node reads.

A token is `sds_ID_SECRET`: 12 and 64 hexadecimal digits. The file contains the SHA-256 of each secret,
which suffices for 256 random bits, and never a secret. It is separate from the database, so the command
line can change it while a node runs, and a node can check tokens while its database is away.

Each process looks at the file before it admits a caller, at most every `LOOK_S` seconds, and as often
without callers. A token that is removed, changed or expired ends the requests that its callers have
running, live streams among them. Where the file cannot be read, every token is refused.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar

from app.access.callers import (
    EVERY_SCOPE,
    Authorizer,
    Caller,
    Rate,
    Scope,
    SenderGrant,
    unauthenticated,
)
from app.access.operator import OPERATOR_ID
from app.errors import Code, Problem
from app.server.disk import replace_file
from app.server.limits import DEFAULT_LIMITS
from app.server.logs import audit_change
from app.server.settings import Settings
from app.server.supervisor import Supervisor
from recon.agreement import Interest

TOKENS_FILE = "tokens.json"
GRANTED_SCOPES = (Scope.READ, Scope.PUBLISH, Scope.SYNC, Scope.ADMIN)

LOOK_S = 0.2
"""From one look at the file to the next: a call of `stat`, some 2 microseconds."""
HOLDS_AFTER_S = 0.5
"""After a change of the file, each process has looked at it: two looks, and a pause of its event loop."""

TOKENS_MAX = 1_000
"""Tokens of a node. All of them are read at each change: some 10 ms."""
VERIFIED_MAX = 4_096
"""Values of `Authorization` that were found valid, until the file changes: some 400 bytes each. Beyond it,
all are forgotten and verified again. It is above `TOKENS_MAX` because a scheme has many spellings."""
NAMES_MAX = 100
"""Channels and prefixes of a token: each costs a step of a look-up by ID without a channel."""
NAME_BYTES_MAX = 256
SENDER_BYTES_MAX = DEFAULT_LIMITS.sender_id_bytes_max
FILE_BYTES_MAX = 64 << 20
"""Of 1,000 tokens with 100 channels of 256 bytes, escaped: a larger file is not ours."""

_VERSION = 1
_PREFIX = "sds"
_ID_DIGITS, _SECRET_DIGITS = 12, 64

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def tokens_path(settings: Settings) -> Path:
    """The file with the tokens of a node."""
    return settings.tokens_file or settings.data_dir / TOKENS_FILE


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token without its secret. `channels` None covers every channel."""

    token_id: str
    name: str
    secret_hash: bytes
    scopes: frozenset[Scope]
    channels: Interest | None
    created_at_ms: int
    expires_at_ms: int | None
    senders: tuple[SenderGrant, ...] = ()
    vouches: bool = False

    def document(self) -> dict[str, Any]:
        """The token as JSON, without the hash of its secret."""
        channels = self.channels
        return {
            "id": self.token_id,
            "name": self.name,
            "scopes": [each for each in GRANTED_SCOPES if each in self.scopes],
            "channels": None if channels is None else list(channels.channels),
            "channel_prefixes": None if channels is None else list(channels.prefixes),
            "created_at_ms": self.created_at_ms,
            "expires_at_ms": self.expires_at_ms,
            "senders": [each._asdict() for each in self.senders],
            "vouches": self.vouches,
        }


# --- the file --------------------------------------------------------------------------------------


_TOKEN_ID = re.compile(rb"sds_([0-9a-f]{1,32})_")

REJECTED_SAID_S = 10.0
"""From one line about rejected tokens to the next: anybody can cause them."""


class TokenFile:
    """The tokens of a node on disk. Each change replaces the file whole, under a lock.

    Raises Problem: `tokens_unavailable` if the file cannot be read or written, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The tokens that were made or revoked by means of this object.
        self.changed: set[str] = set()

    def identity(self) -> tuple[int, ...] | None:
        """Differs after each change; None while there is no file."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unavailable(self.path, error) from None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def read(self) -> list[Token]:
        """All tokens, oldest first; none if there is no file."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unavailable(self.path, error) from None
        try:
            return _tokens_in(raw)
        except Exception as error:  # noqa: BLE001 - damage fails in every way that values can
            raise _unavailable(self.path, error) from None

    def create(
        self,
        *,
        name: str = "",
        scopes: Sequence[str],
        channels: Sequence[str] = (),
        prefixes: Sequence[str] = (),
        expires_in_s: float | None = None,
        senders: Sequence[SenderGrant] = (),
        vouches: bool = False,
    ) -> tuple[Token, str]:
        """A new token, and its text, which is not kept. Without channels and prefixes it covers all.

        `senders` and `vouches`: as in `Caller`.

        Raises Problem: `invalid_parameter`, `too_many_items`, `tokens_unavailable`.
        """
        _check(name, scopes, channels, prefixes, expires_in_s)
        _check_senders(senders)
        token_id, secret = (
            secrets.token_hex(_ID_DIGITS // 2),
            secrets.token_hex(_SECRET_DIGITS // 2),
        )
        now_ms = _now_ms()
        token = Token(
            token_id=token_id,
            name=name,
            secret_hash=_hash(secret),
            scopes=frozenset(map(Scope, scopes)),
            channels=_interest(channels, prefixes),
            created_at_ms=now_ms,
            expires_at_ms=None if expires_in_s is None else now_ms + int(expires_in_s * 1_000),
            senders=tuple(senders),
            vouches=vouches,
        )

        def add(tokens: list[Token]) -> None:
            if len(tokens) >= TOKENS_MAX:
                detail = f"a node has at most {TOKENS_MAX} tokens; revoke some"
                raise Problem(Code.TOO_MANY_ITEMS, detail)
            tokens.append(token)

        self.changed.add(token_id)
        self._change(add)
        return token, f"{_PREFIX}_{token_id}_{secret}"

    def revoke(self, token_id: str) -> Token:
        """Remove a token. It holds in every process after `HOLDS_AFTER_S`. Raises Problem: `not_found`."""

        def remove(tokens: list[Token]) -> Token:
            for place, each in enumerate(tokens):
                if each.token_id == token_id:
                    return tokens.pop(place)
            raise Problem(Code.NOT_FOUND, f"no token {token_id[:64]}")

        self.changed.add(token_id)
        return self._change(remove)

    def _change(self, change: Callable[[list[Token]], _Result]) -> _Result:
        with self._locked():
            tokens = self.read()
            result = change(tokens)
            document = {"version": _VERSION, "tokens": [_row(each) for each in tokens]}
            replace_file(self.path, json.dumps(document, indent=1).encode())
        return result

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The folder itself: a file for the lock would belong to whoever changed the tokens first.
            lock = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unavailable(self.path, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for milliseconds by whoever has it
            yield
        except OSError as error:
            raise _unavailable(self.path, error) from None
        finally:
            os.close(lock)


def _check(
    name: str,
    scopes: Sequence[str],
    channels: Sequence[str],
    prefixes: Sequence[str],
    expires_in_s: float | None,
) -> None:
    """Raise Problem unless a token can be made of these."""
    names = ", ".join(GRANTED_SCOPES)
    if not scopes:
        raise Problem(Code.INVALID_PARAMETER, f"a token has at least one scope of: {names}")
    for each in scopes:
        if each not in GRANTED_SCOPES:
            detail = f"{each[:100]!r} is not a scope; the scopes are: {names}"
            raise Problem(Code.INVALID_PARAMETER, detail)
    if Scope.ADMIN in scopes and (channels or prefixes):
        detail = "an operator's actions reach every channel: the scope admin cannot be limited"
        raise Problem(Code.INVALID_PARAMETER, detail)
    if len(channels) + len(prefixes) > NAMES_MAX:
        detail = f"a token has at most {NAMES_MAX} channels and prefixes"
        raise Problem(Code.TOO_MANY_ITEMS, detail)
    if "" in prefixes:
        detail = "the empty prefix is every channel: leave the limits out for that"
        raise Problem(Code.INVALID_PARAMETER, detail)
    for each in (name, *channels, *prefixes):
        if len(each.encode()) > NAME_BYTES_MAX:
            raise Problem(Code.INVALID_PARAMETER, f"a name has at most {NAME_BYTES_MAX} bytes")
    if expires_in_s is not None and not 0 < expires_in_s <= 100 * 365 * 86_400:
        detail = f"the time until a token expires is above 0 s and at most 100 years, not {expires_in_s:g} s"
        raise Problem(Code.INVALID_PARAMETER, detail)


def _check_senders(senders: Sequence[SenderGrant]) -> None:
    """Raise Problem unless a token can be bound to these."""
    if len(senders) > NAMES_MAX:
        raise Problem(Code.TOO_MANY_ITEMS, f"a token is bound to at most {NAMES_MAX} senders")
    for each in senders:
        if len(each.sender.encode()) > SENDER_BYTES_MAX:
            detail = f"a sender ID has at most {SENDER_BYTES_MAX} bytes"
            raise Problem(Code.INVALID_PARAMETER, detail)
        if len(each.channels.encode()) > NAME_BYTES_MAX:
            raise Problem(Code.INVALID_PARAMETER, f"a name has at most {NAME_BYTES_MAX} bytes")


def _interest(channels: Sequence[str], prefixes: Sequence[str]) -> Interest | None:
    if not channels and not prefixes:
        return None
    return Interest.make(channels=frozenset(channels), prefixes=frozenset(prefixes))


def _row(token: Token) -> dict[str, Any]:
    return token.document() | {"sha256": token.secret_hash.hex()}


def _tokens_in(raw: bytes) -> list[Token]:
    """The tokens of a file. Raises an error of any kind if it is damaged: RecursionError, for example."""
    if len(raw) > FILE_BYTES_MAX:
        raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
    document = json.loads(raw)
    if document["version"] != _VERSION:
        raise ValueError(f"its version is {document['version']!r}, not {_VERSION}")
    return [_from_row(each) for each in document["tokens"]]


def _from_row(row: Mapping[str, Any]) -> Token:
    """Raises an error of any kind for anything that `_row` does not make."""
    limits = (row["channels"], row["channel_prefixes"])
    channels = None
    if limits != (None, None):
        channels = Interest.make(channels=_texts(limits[0]), prefixes=_texts(limits[1]))
    expires_at_ms = row["expires_at_ms"]
    secret_hash = bytes.fromhex(row["sha256"])
    if len(secret_hash) != hashlib.sha256().digest_size:
        raise ValueError("a hash is not a SHA-256")
    return Token(
        token_id=str(row["id"]),
        name=str(row["name"]),
        secret_hash=secret_hash,
        scopes=frozenset(Scope(each) for each in row["scopes"]),
        channels=channels,
        created_at_ms=int(row["created_at_ms"]),
        expires_at_ms=None if expires_at_ms is None else int(expires_at_ms),
        senders=tuple(_sender(each) for each in row.get("senders", ())),
        vouches=row.get("vouches", False) is True,
    )


def _sender(row: Mapping[str, Any]) -> SenderGrant:
    sender, channels = row["sender"], row["channels"]
    if not isinstance(sender, str) or not isinstance(channels, str):
        raise TypeError("a sender and its channels are texts")
    return SenderGrant(sender, channels)


def _texts(names: object) -> frozenset[str]:
    # Anything but a list of texts must not become another grant: a text alone is a set of letters.
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise TypeError("channels and prefixes are lists of texts")
    return frozenset(names)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _unavailable(path: Path, error: Exception) -> Problem:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Problem(Code.TOKENS_UNAVAILABLE, f"the tokens in {path} cannot be used: {reason}")


# --- the tokens of a running node -------------------------------------------------------------------


class Tokens:
    """The tokens as this process knows them. Use `watched` while callers are served.

    `operator`: the token of `app.access.operator`, which holds whatever the file contains.
    """

    def __init__(self, file: TokenFile, operator: str = "") -> None:
        self.file = file
        self.says_changes = True  # one process of a service
        self._operator_hash = _hash(operator.rpartition("_")[2]) if operator else b""
        self._identity: tuple[int, ...] | None = None
        self._callers: dict[str, tuple[Token, Caller]] = {}
        self._problem: Problem | None = None
        # The tokens that could be read last; None before the first time.
        self._seen: dict[str, Token] | None = None
        self._rejected_count = 0
        self._rejected_said_s = float("-inf")
        self._looked_s = float("-inf")
        # By the value of the header itself: hashing it with SHA-256 would cost a request 1.7 us. How long a
        # look-up takes reveals nothing about a secret. Python compares the bytes of a guess only if all 64
        # bits of its hash are those of a value here, and hashes bytes with SipHash and a random key of this
        # process. Where PYTHONHASHSEED fixes that key, at most those 64 of the 256 bits could leak.
        self._verified: dict[bytes, tuple[Token, Caller]] = {}
        # The tokens of the requests that run: a revocation ends them.
        self._running: dict[asyncio.Task[Any], str] = {}

    def expiries(self) -> dict[str, float]:
        """When tokens expire, by ID, in Unix seconds; those that never do are left out."""
        return {
            token_id: token.expires_at_ms / 1_000
            for token_id, (token, _) in self._callers.items()
            if token.expires_at_ms is not None
        }

    def refusal(self) -> str | None:
        """Why every token is refused; None if they are not."""
        return None if self._problem is None else self._problem.detail

    def caller(self, authorization: bytes) -> Caller:
        """The caller with the value of an `Authorization` header.

        Raises Problem: `unauthenticated`, `tokens_unavailable`. An unknown token, a revoked one and a
        wrong secret have one answer.
        """
        if time.monotonic() - self._looked_s > LOOK_S:
            self.look()
        known = self._verified.get(authorization)
        if known is None:
            known = self._verify(authorization)
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified[authorization] = known
        token, caller = known
        if token.expires_at_ms is not None and _is_past(token.expires_at_ms):
            raise unauthenticated("the access token has expired")
        return caller

    def _verify(self, authorization: bytes) -> tuple[Token, Caller]:
        scheme, _, text = authorization.partition(b" ")
        parts = text.strip().split(b"_")
        if scheme.lower() != b"bearer" or len(parts) != 3:
            raise unauthenticated("the Authorization header is not Bearer and an access token")
        token_id = parts[1].decode("latin-1")
        if token_id == OPERATOR_ID and compare_digest(
            self._operator_hash, hashlib.sha256(parts[2]).digest()
        ):
            return _OPERATOR
        if self._problem is not None:
            raise self._problem.detached()
        if token_id not in self._callers:
            self.look()  # it may have been made since the last look
        known = self._callers.get(token_id)
        secret_hash = hashlib.sha256(parts[2]).digest()
        if known is None or not compare_digest(known[0].secret_hash, secret_hash):
            raise unauthenticated("the access token is not valid")
        return known

    def begin(self, caller: Caller, task: asyncio.Task[Any]) -> None:
        """A task works for a caller with a token: a revocation cancels it until `end`.

        Raises Problem(UNAUTHENTICATED) if the token was revoked since the caller was identified.
        """
        if time.monotonic() - self._looked_s > LOOK_S:
            self.look()
        token, now = self._callers.get(caller.token_id or "", (None, caller))
        # A page of another origin has fewer scopes than its token.
        is_same = caller is now or caller == replace(now, scopes=caller.scopes & now.scopes)
        if (
            token is None
            or not is_same
            or (token.expires_at_ms is not None and _is_past(token.expires_at_ms))
        ):
            raise unauthenticated("the access token was revoked or has expired")
        self._running[task] = token.token_id

    def end(self, task: asyncio.Task[Any]) -> None:
        """A task has ended its work for the caller of `begin`."""
        self._running.pop(task, None)

    @asynccontextmanager
    async def watched(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Look at the file while the block runs, and end what revoked callers have running."""
        self.look()

        async def look() -> None:
            self.look()

        async with supervisor.repeating("tokens", look, LOOK_S):
            yield

    def look(self) -> None:
        """Read the file if it has changed; end the requests of callers whose token is not valid now."""
        self._looked_s = time.monotonic()
        try:
            # Before the read: a change after it is seen at the next look.
            identity = self.file.identity()
            if identity != self._identity or self._problem is not None:
                self._take(self.file.read())
                self._identity = identity
        except Problem as problem:
            if self._problem is None:
                _log.error("%s: every token is refused", problem.detail)
            self._problem, self._callers, self._verified = problem.detached(), {}, {}
        self._end([each for each in set(self._running.values()) if not self._is_known(each)])

    def _take(self, tokens: Sequence[Token]) -> None:
        """Use these tokens. A token whose grants have changed ends what its callers have running."""
        if self._problem is not None:
            _log.info("the tokens can be read again")
        before, self._problem, self._verified = self._callers, None, {}
        self._callers = {each.token_id: (each, _caller_of(each)) for each in tokens}
        self._say_changes({each.token_id: each for each in tokens})
        self._end([each for each in before if self._callers.get(each) != before[each]])

    def _say_changes(self, now: dict[str, Token]) -> None:
        """One line of the audit log for each token that was made, changed or revoked by another process."""
        before, self._seen = self._seen, now
        own, self.file.changed = self.file.changed, set()
        if before is None or not self.says_changes:
            return
        for token_id in sorted((before.keys() | now.keys()) - own):
            if before.get(token_id) != now.get(token_id):
                done = "made" if token_id not in before else "changed"
                action = f"token {done if token_id in now else 'revoked'}"
                audit_change(action, f"{token_id} in {self.file.path}")

    def note_rejected(self, headers: Mapping[bytes, bytes], address: str, reason: str) -> None:
        """A caller was refused. If it sent a token, log that; at most one line each `REJECTED_SAID_S`."""
        authorization = headers.get(b"authorization")
        if authorization is None:
            return
        self._rejected_count += 1
        if time.monotonic() - self._rejected_said_s < REJECTED_SAID_S:
            return
        found = _TOKEN_ID.search(authorization)
        shown = f"the token {found[1].decode()}" if found else "no token of this node's form"
        _log.warning(
            "%d requests since the last such line were refused because of their token; the last one sent %s, from %s: %s",
            self._rejected_count,
            shown,
            address,
            reason,
        )
        self._rejected_count, self._rejected_said_s = 0, time.monotonic()

    def _end(self, token_ids: Sequence[str]) -> None:
        if not token_ids:
            return
        ended = frozenset(token_ids)
        for task in [task for task, token_id in self._running.items() if token_id in ended]:
            del self._running[task]
            task.cancel("the access token was revoked")

    def _is_known(self, token_id: str) -> bool:
        known = self._callers.get(token_id)
        if known is None:
            return False
        ends_ms = known[0].expires_at_ms
        return ends_ms is None or not _is_past(ends_ms)


_OPERATOR = (
    Token(
        token_id=OPERATOR_ID,
        name="",
        secret_hash=b"",
        scopes=EVERY_SCOPE,
        channels=None,
        created_at_ms=0,
        expires_at_ms=None,
    ),
    Caller(
        OPERATOR_ID, vouches=True
    ),  # no rate limit, and no token that could be revoked while the node runs
)


def _caller_of(token: Token) -> Caller:
    return Caller(
        f"token {token.token_id}",
        token.scopes,
        token.channels,
        token_id=token.token_id,
        rate=Rate.CALLER,
        senders=token.senders,
        vouches=token.vouches or Scope.ADMIN in token.scopes,
    )


def _is_past(moment_ms: int) -> bool:
    return moment_ms <= _now_ms()


class TokenAuthorizer:
    """Callers with a token; the others as another authorizer identifies them.

    Where that one does not know a caller, the caller is an anonymous one who may use open routes only.
    """

    def __init__(self, tokens: Tokens, without_token: Authorizer) -> None:
        self._tokens = tokens
        self.without_token = without_token

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        """See `app.access.callers.Authorizer`."""
        authorization = headers.get(b"authorization")
        # Other schemes are not the node's: a proxy that checks passwords may pass them on.
        if authorization is None or authorization[:7].lower() != b"bearer ":
            return self.without_token.identify(client_host, headers)
        return self._tokens.caller(authorization)
