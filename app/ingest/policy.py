"""An operator's own policy: a Python object that accepts, refuses or quarantines each message.

    class NoSpam:
        revision = "2026-05-01"

        def __call__(self, candidate: Candidate) -> Verdict:
            if b"casino" in (candidate.message.content or b""):
                return quarantine("mentions a casino")
            return ACCEPT

The setting `policy` names it: `package.module:name`, or the name of an entry point of the group
`sdstore.policy`. A class is called without arguments. `Judge` calls the policy for each message
at the door, in a thread of its own.

A message that is stored is not judged: it is a duplicate, however it came to be stored. So a message that
an operator released, or imported, does not return to the quarantine. One that is held stays held, and one
that was dropped stays refused, whatever the revision of the policy.

The rule for a policy that fails is to refuse: a message on which it raises an exception, returns no
verdict, or takes too long gets `policy_failed` (503), so honest publishers and peers try again later. While a
call hangs, every message is refused at once. The log says so once a minute at most.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeGuard

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from app.access.callers import Binding, Caller
from app.entries import NewEntry
from app.errors import Code, Problem, SettingsError
from app.ingest.prepare import Relayed
from app.ingest.quarantine import Fate, Quarantine
from app.server.limits import Limits
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
    ID matches the content by a known scheme. `caller` names who brings it, and `binding` says what its
    credentials say of the sender.
    """

    message: Message
    frame: bytes
    digest: bytes
    id_verifies: bool
    is_content: bool
    way: Way
    caller: str = ""
    binding: Binding = Binding.UNBOUND


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


# ---- calling it

Checked = NewEntry | Relayed | Problem
Stored = Callable[[Sequence[bytes]], Awaitable[Container[bytes]]]
"""Those of these digests whose entries the store has."""

LOG_AGAIN_S = 60.0
RETRY_AFTER_S = 5

_log = logging.getLogger(__name__)


class Judge(Collector):
    """The policy of one process, with its thread. `verdicts` counts what happened to messages."""

    def __init__(self, policy: Policy, quarantine: Quarantine, limits: Limits) -> None:
        self.verdicts: Counter[str] = Counter()
        self._policy = policy
        self._quarantine = quarantine
        self._limits = limits
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn = asyncio.Lock()
        self._waiting_count = 0
        self._is_closing = False
        self._hanging: asyncio.Future[list[Checked]] | None = None
        self._logged_s = float("-inf")
        # A daemon: a policy that hangs must not keep the process from ending.
        threading.Thread(target=self._run, name="sdstore-policy", daemon=True).start()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        family = CounterMetricFamily(
            "sdstore_policy_verdicts",
            "Verdicts on messages, by the policy or by an earlier decision about the same message",
            labels=("verdict",),
        )
        for verdict, count in sorted(self.verdicts.items()):
            family.add_metric([verdict], count)
        yield family

    async def judge(
        self, checked: Sequence[Checked], way: Way, stored: Stored, caller: Caller
    ) -> list[Checked]:
        """The accepted messages, and refusals in the place of the others, in order.

        `caller`: who brings them; against it the memory of refused ones counts.

        Raises Problem: `overloaded` if too many callers wait for the policy.
        """
        if self._waiting_count >= self._limits.requests_waiting_max:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise Problem(Code.OVERLOADED, "too many messages wait for the policy", headers=headers)
        judged: list[Checked] = []
        some_max = self._limits.policy_call_items_max
        self._waiting_count += 1
        try:
            for start in range(0, len(checked), some_max):
                judged += await self._some(checked[start : start + some_max], way, stored, caller)
        finally:
            self._waiting_count -= 1
            self._end_if_idle()
        return judged

    def close(self) -> None:
        """End the thread, once those that wait for it have their verdicts."""
        self._is_closing = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_closing and not self._waiting_count:
            self._calls.put(None)

    async def _some(
        self, checked: Sequence[Checked], way: Way, stored: Stored, caller: Caller
    ) -> list[Checked]:
        digests = [each.digest for each in checked if isinstance(each, NewEntry)]
        fates: Mapping[bytes, Fate] = {}
        here: Container[bytes] = ()
        if digests:
            try:
                fates = await asyncio.to_thread(self._quarantine.fates, digests)
            except Problem as problem:
                return self._failed(checked, str(problem))
            # After the fates: a released message leaves the quarantine only when it is stored.
            here = await stored(digests)
        judged: list[Checked] = []
        unknown: list[tuple[int, NewEntry | Relayed]] = []
        for each in checked:
            if isinstance(each, Problem) or (isinstance(each, NewEntry) and each.digest in here):
                judged.append(each)
            elif isinstance(each, NewEntry) and each.digest in fates:
                judged.append(self._known(fates[each.digest]))
            else:
                unknown.append((len(judged), each))
                judged.append(each)
        if unknown:
            verdicts = await self._called([each for _, each in unknown], way, caller)
            for (at, _), verdict in zip(unknown, verdicts, strict=True):
                judged[at] = verdict
        return judged

    async def _called(
        self, unknown: Sequence[NewEntry | Relayed], way: Way, caller: Caller
    ) -> list[Checked]:
        """What the policy says of some messages, in bounded time."""
        async with self._turn:  # the time of a call begins when the call before it has ended
            if self._hanging is not None and not self._hanging.done():
                return self._failed(unknown, "a call of the policy has not returned")
            loop = asyncio.get_running_loop()
            future: asyncio.Future[list[Checked]] = loop.create_future()

            def call() -> None:
                judged = self._judged(unknown, way, caller)
                # The loop is closed if the node ended while the policy hung.
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_resolve, future, judged)

            self._calls.put(call)
            seconds = self._limits.policy_call_s_max
            done, _ = await asyncio.wait({future}, timeout=seconds)
            if done:
                return future.result()
            self._hanging = future
            return self._failed(unknown, f"the policy took more than {seconds} s")

    def _failed(self, checked: Sequence[Checked], why: str) -> list[Checked]:
        self._log(why)
        return [each if isinstance(each, Problem) else self._failure() for each in checked]

    def _failure(self, *, is_of_message: bool = False) -> Problem:
        """`is_of_message`: the policy judges others."""
        self.verdicts["failed"] += 1
        return Problem(
            Code.POLICY_FAILED,
            "the policy of this node did not judge the message",
            extra={"policy_code": "no_verdict"} if is_of_message else None,
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )

    def _log(self, why: str, error: BaseException | None = None) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s > LOG_AGAIN_S:
            self._logged_s = now_s
            _log.error("messages are refused: %s", why, exc_info=error)

    # --- the policy's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _judged(
        self, unknown: Sequence[NewEntry | Relayed], way: Way, caller: Caller
    ) -> list[Checked]:
        """Never raises."""
        judged: list[Checked] = []
        held: list[tuple[int, NewEntry, str]] = []
        refused: list[NewEntry] = []
        for each in unknown:
            verdict = self._verdict(each, way, caller)
            if verdict is None:
                judged.append(self._failure(is_of_message=True))
            elif verdict.action is Action.ACCEPT:
                self.verdicts["accepted"] += 1
                judged.append(each)
            elif verdict.action is Action.QUARANTINE and _can_wait(each):
                held.append((len(judged), each, verdict.detail))
                judged.append(each)
            else:
                if verdict.action is Action.QUARANTINE and isinstance(each, NewEntry):
                    verdict = Verdict(Action.REFUSE, "quarantine", "the policy would hold it")
                # A message that is only relayed cannot wait for an operator.
                judged.append(self._refused(verdict))
                if isinstance(each, NewEntry) and each.id_verifies:
                    refused.append(each)
        if held:
            self._hold(judged, held, way, caller.name)
        if refused:
            try:
                self._quarantine.refuse(refused, caller.name)
            except Problem as problem:
                self._log(f"readers are not told: {problem}")
        return judged

    def _verdict(self, each: NewEntry | Relayed, way: Way, caller: Caller) -> Verdict | None:
        is_content = isinstance(each, NewEntry)
        candidate = Candidate(
            each.message,
            each.frame,
            each.digest if isinstance(each, NewEntry) else b"",
            isinstance(each, NewEntry) and each.id_verifies,
            is_content,
            way,
            caller.name,
            caller.binding(each.message.sender_id, each.message.channel_id),
        )
        try:
            return checked_verdict(self._policy(candidate))
        except BaseException as error:  # noqa: BLE001 - whatever code of the operator raises
            self._log("the policy raised an exception, or returned no verdict", error)
            return None

    def _hold(
        self, judged: list[Checked], held: Sequence[tuple[int, NewEntry, str]], way: Way, who: str
    ) -> None:
        try:
            kept = self._quarantine.hold([(entry, way, reason) for _, entry, reason in held], who)
        except Problem as problem:
            self._log(str(problem))
            for at, _, _ in held:
                judged[at] = self._failure()
            return
        for (at, _, _), is_kept in zip(held, kept, strict=True):
            if is_kept:
                judged[at] = self._known(Fate.HELD)
            else:
                full = Verdict(Action.REFUSE, "quarantine_full", "the quarantine is full")
                judged[at] = self._refused(full)

    def _known(self, fate: Fate) -> Problem:
        if fate is Fate.HELD:
            self.verdicts["quarantined"] += 1
            return Problem(
                Code.QUARANTINED,
                "the message is in this node's quarantine until an operator decides",
            )
        return self._refused(Verdict(Action.REFUSE, "dropped", "an operator dropped the message"))

    def _refused(self, verdict: Verdict) -> Problem:
        self.verdicts["refused"] += 1
        code = verdict.code or "not_content"
        return Problem(Code.POLICY_REFUSED, verdict.detail or code, extra={"policy_code": code})


def _can_wait(each: NewEntry | Relayed) -> TypeGuard[NewEntry]:
    return isinstance(each, NewEntry) and not each.without_quarantine


def _resolve(future: asyncio.Future[list[Checked]], judged: list[Checked]) -> None:
    if not future.done():
        future.set_result(judged)
