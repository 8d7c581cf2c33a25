"""The audit: a background job that proves, step by step, that what this node keeps agrees with itself.

A pass consists of stages, and a stage of steps of one to three milliseconds; pauses between them hold the
audit to a small share of one core. The first process of a node checks the database: frames against
rows, rows against keys and the arrival chain, rows against SQL indexes, references and counters. Each
process checks its own range index against the database. The audit repairs only caches: it reads the
index again from SQL. It reports everything else with a remedy (docs/operations.md), and the node goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import Problem
from app.limits import Limits
from app.recon.index import NodeIndex
from app.recon.indexaudit import IndexAudit, IndexStep
from app.store.integrity import RowStep, is_damage, message_or_fault
from app.store.store import Store
from app.supervisor import Supervisor, ended

FRAMES_PER_STEP = 16
BYTES_PER_STEP = 256 * 1024
ROWS_PER_STEP = 256
PROBED_PER_STEP = 32
ELEMENTS_PER_STEP = 512
CHANNELS_PER_STEP = 16
"""A step takes one to three milliseconds of the event loop: as long as a request."""

PAUSE_S_MAX = 60.0
"""After a step that took long, such as reading the index again."""

TRY_AGAIN_S = 30.0
"""Pause after a fault of the database."""

PASS_REST_S_MIN = 1.0
"""Between two passes, where a pass takes longer than the interval."""

SKIPS_MAX = 256
"""Steps of a stage that fail one after the other; then nothing of it is readable, and the stage ends."""

READ_AGAIN_S_MIN = 3_600.0
"""Between two readings of the index: an index that is wrong again at once has another cause than memory."""

FINDINGS_MAX = 256
"""Findings that are kept and logged: 100 KiB. Others are only counted."""

WHAT_CHARACTERS_MAX = 400
"""Of the description of a finding: IDs that it quotes can be long."""

FIRST = -1
"""The place before the first row."""

_log = logging.getLogger(__name__)


# ---- findings


class Kind(StrEnum):
    """What a finding is about."""

    CONTENT = "content"
    FRAME = "frame"
    ROW = "row"
    REFERENCE = "reference"
    COUNTER = "counter"
    CHANNEL = "channel"
    SQL_INDEX = "sql_index"
    INDEX = "index"
    UNREADABLE = "unreadable"


_CHECK = "stop publishing if you can, then run: sdstore check --deep"
REMEDIES = {
    Kind.CONTENT: "the content comes back with the next sync with a peer that has it",
    Kind.FRAME: _CHECK,
    Kind.ROW: _CHECK,
    Kind.REFERENCE: _CHECK,
    Kind.COUNTER: _CHECK,
    Kind.CHANNEL: _CHECK,
    Kind.SQL_INDEX: "run: sdstore reindex (on SQLite, stop the node first)",
    Kind.INDEX: "none needed: the range index is read again from the database",
    Kind.UNREADABLE: _CHECK,
}
"""What an operator does about a finding."""


@dataclass(slots=True)
class Finding:
    """One contradiction: what it is, when it was first and last seen, and how often."""

    kind: Kind
    what: str
    first_at_ms: int
    last_at_ms: int
    times: int = 1


def _with_remedy(finding: Finding) -> dict[str, Any]:
    return asdict(finding) | {"remedy": REMEDIES[finding.kind]}


class Findings:
    """The contradictions that the current and the last pass found. `counts`: of all since the start."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()
        self._open: dict[tuple[Kind, str], Finding] = {}

    def add(self, kind: Kind, what: str) -> None:
        """Note a finding; log it if it is new."""
        self.counts[kind] += 1
        what = what[:WHAT_CHARACTERS_MAX]
        now_ms = _now_ms()
        if known := self._open.get((kind, what)):
            known.last_at_ms = now_ms
            known.times += 1
        elif len(self._open) < FINDINGS_MAX:
            self._open[kind, what] = Finding(kind, what, now_ms, now_ms)
            _log.error("the audit found (%s): %s; remedy: %s", kind, what, REMEDIES[kind])

    def forget_before(self, at_ms: int) -> None:
        """Forget what was last seen before a time: a pass that began then did not find it again."""
        self._open = {at: each for at, each in self._open.items() if each.last_at_ms >= at_ms}

    def restore(self, finding: Finding) -> None:
        """Take a finding of an earlier process, without logging it again."""
        self._open[finding.kind, finding.what] = finding

    def open(self) -> list[Finding]:
        """The findings, oldest first."""
        return list(self._open.values())

    def document(self) -> list[dict[str, Any]]:
        """The findings as JSON, each with its remedy."""
        return [_with_remedy(each) for each in self.open()]


# ---- passes


class Step(NamedTuple):
    """Items that a step checked, the place of the next one (None: the stage is done), and findings."""

    checked_count: int
    next: Any
    findings: list[tuple[Kind, str]]


class Stage(NamedTuple):
    """A part of a pass: `step` checks items after a place. `skipped`: numbers to skip if it fails."""

    name: str
    step: Callable[[Any], Awaitable[Step]]
    skipped: int = 0


@dataclass(slots=True)
class Pass:
    """One pass: its stage and the place there, items checked by stage, and the number of findings.

    `ended_at_ms` is None while it runs.
    """

    stage: str = ""
    place: Any = FIRST
    began_at_ms: int = 0
    ended_at_ms: int | None = None
    checked: dict[str, int] = field(default_factory=dict)
    findings_count: int = 0
    lost_count: int = 0


class Audit:
    """See the module. `cpu_s`: time of the event loop's thread in steps, with what ran in between."""

    def __init__(self, store: Store, index: NodeIndex, limits: Limits, path: Path) -> None:
        self.findings = Findings()
        self.current = Pass()
        self.last: Pass | None = None
        self.passes_count = 0
        self.read_again_count = 0
        self.checked: Counter[str] = Counter()
        self.cpu_s = 0.0
        self._store = store
        self._index = index
        self._index_audit = IndexAudit(store, index)
        self._limits = limits
        self._path = path
        self._checks_store = False
        self._stages: dict[str, Stage] = {}
        self._skips_count = 0
        self._read_again_at_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor, *, checks_store: bool) -> None:
        """Audit in the background from now on."""
        self.prepare(checks_store=checks_store)
        self._task = supervisor.keep("audit", self._keep_checking)

    def prepare(self, *, checks_store: bool) -> None:
        """Begin, or go on where the last process stopped; `checks_store`: set by one process of a node."""
        self._checks_store = checks_store
        stages = [*(self._store_stages() if checks_store else ()), *self._index_stages()]
        self._stages = {each.name: each for each in stages}
        if checks_store:
            self._remember()

    async def close(self) -> None:
        """Stop, and save the place."""
        await ended(self._task)
        self._keep_place()

    def document(self) -> dict[str, Any]:
        """The audit as JSON; the place and the findings in the store are those of the process that checks it."""
        current, last, findings = self.current, self.last, self.findings.document()
        if not self._checks_store:
            current, last, saved = self._saved()
            findings = [*map(_with_remedy, saved), *findings]
        return {
            "share_percent_max": self._limits.audit_percent_max,
            "cpu_s": round(self.cpu_s, 3),
            "stages": list(self._stages),
            "pass": asdict(current),
            "last_pass": asdict(last) if last else None,
            "index_read_again": self.read_again_count,
            "found_total": {kind.value: self.findings.counts[kind] for kind in Kind},
            "findings": findings,
        }

    def frames_document(self) -> dict[str, Any]:
        """How far the reading of frames is, for /v1/info; of the process that reads them."""
        current, last = self.current, self.last
        if not self._checks_store:
            current, last, _ = self._saved()
        is_reading = current.stage == "frames"
        return {
            "seq": max(current.place, 0) if is_reading else 0,
            "frames_read": current.checked.get("frames", 0),
            "lost_found": current.lost_count,
            "last_pass_ended_at_ms": last.ended_at_ms if last else None,
        }

    # ---- the loop

    async def _keep_checking(self) -> None:
        await asyncio.sleep(self._limits.audit_delay_s)
        kept_at = time.monotonic()
        while True:
            await asyncio.sleep(await self.step())
            if time.monotonic() - kept_at > self._limits.index_save_interval_s:
                kept_at = time.monotonic()
                self._keep_place()

    async def step(self) -> float:
        """Check a few items, whatever fails; returns the seconds to rest until the next step."""
        began_s = time.thread_time()
        try:
            rest_s = await self._step()
        except Problem as problem:
            if not is_damage(problem):
                _log.debug("the audit waits: %s", problem)
                return TRY_AGAIN_S
            rest_s = self._skip(str(problem))
        except Exception as error:  # noqa: BLE001 - damaged rows fail in every way that values can
            rest_s = self._skip(f"{type(error).__name__}: {error}")
        spent_s = time.thread_time() - began_s
        self.cpu_s += spent_s
        share_s = spent_s * (100 / self._limits.audit_percent_max - 1)
        return rest_s or min(share_s, PAUSE_S_MAX)

    async def _step(self) -> float:
        """Check a few items. Returns seconds to rest after a whole pass, or else 0."""
        place = self.current
        if place.stage not in self._stages:
            self.current = place = Pass(stage=next(iter(self._stages)), began_at_ms=_now_ms())
            self._index_audit.begin()
        checked_count, after, findings = await self._stages[place.stage].step(place.place)
        self._skips_count = 0
        place.checked[place.stage] = place.checked.get(place.stage, 0) + checked_count
        self.checked[place.stage] += checked_count
        for finding in findings:
            place.findings_count += 1
            self.findings.add(*finding)
        place.place = after
        return self._end_stage() if after is None else 0

    def _skip(self, reason: str) -> float:
        """Note that a step failed, and go on after its items."""
        place = self.current
        if place.stage not in self._stages:
            _log.warning("the audit cannot begin: %s", reason)
            return TRY_AGAIN_S
        place.findings_count += 1
        self.findings.add(Kind.UNREADABLE, f"{place.stage} cannot be read: {reason}")
        self._skips_count += 1
        skipped = self._stages[place.stage].skipped
        if not skipped or self._skips_count > SKIPS_MAX:
            return self._end_stage()
        place.place = max(place.place, 0) + skipped
        return 0

    def _end_stage(self) -> float:
        """Go on to the next stage, or end the pass; returns as `_step`."""
        self._skips_count = 0
        names = list(self._stages)
        done = self.current
        at = names.index(done.stage) + 1
        if at < len(names):
            done.stage, done.place = names[at], FIRST
            return 0
        done.stage, done.place, done.ended_at_ms = "", FIRST, _now_ms()
        if done.findings_count:
            _log.warning(
                "the audit found %d faults in this pass; `sdstore check --node` lists them",
                done.findings_count,
            )
        self.passes_count += 1
        self.last, self.current = done, Pass()
        self.findings.forget_before(done.began_at_ms)
        self._keep_place()
        passed_s = (done.ended_at_ms - done.began_at_ms) / 1_000
        return max(PASS_REST_S_MIN, self._limits.audit_interval_s - passed_s)

    # ---- stages

    def _store_stages(self) -> list[Stage]:
        checks, probe = self._store.row_check, self._store.index_probe
        return [
            Stage("frames", self._frames, FRAMES_PER_STEP),
            *(
                Stage(f"rows of {table}", partial(self._rows, checks.step, table), ROWS_PER_STEP)
                for table in checks.tables
            ),
            Stage("missing references", self._missing),
            Stage("counters", self._counters),
            *(
                Stage(f"indexes of {table}", partial(self._probed, table), PROBED_PER_STEP)
                for table in probe.tables
            ),
        ]

    def _index_stages(self) -> list[Stage]:
        return [
            Stage("index elements", self._elements),
            Stage("index channels", self._channels),
        ]

    async def _frames(self, after: int) -> Step:
        read = await self._store.frames.verify(max(after, 0), FRAMES_PER_STEP, BYTES_PER_STEP)
        self.current.lost_count += len(read.lost)
        findings = [
            (Kind.CONTENT, f"the frame of message number {seq} cannot be read") for seq in read.lost
        ]
        for entry in read.entries:
            fault = message_or_fault(entry)
            if isinstance(fault, str):
                findings.append((Kind.FRAME, f"message number {entry.seq}: {fault}"))
        return Step(read.frames_count, read.last_seq if read.frames_count else None, findings)

    async def _rows(self, step: Callable[..., Awaitable[RowStep]], table: str, after: int) -> Step:
        done = await step(table, after, ROWS_PER_STEP)
        return Step(done.rows_count, done.next, [(Kind.ROW, each) for each in done.faults])

    async def _probed(self, table: str, after: int) -> Step:
        done = await self._store.index_probe.step(table, after, PROBED_PER_STEP)
        return Step(done.rows_count, done.next, [(Kind.SQL_INDEX, each) for each in done.faults])

    async def _missing(self, after: Any) -> Step:
        place = (FIRST, "") if after == FIRST else (int(after[0]), str(after[1]))
        count, place_after, faults = await self._store.row_check.missing_step(place, ROWS_PER_STEP)
        return Step(count, place_after, [(Kind.REFERENCE, each) for each in faults])

    async def _counters(self, _: Any) -> Step:
        faults = [fault async for fault in self._store.row_check.counter_faults()]
        return Step(1, None, [(Kind.COUNTER, each) for each in faults])

    async def _elements(self, _: Any) -> Step:
        return await self._of_index(await self._index_audit.elements_step(ELEMENTS_PER_STEP))

    async def _channels(self, _: Any) -> Step:
        return await self._of_index(await self._index_audit.channels_step(CHANNELS_PER_STEP))

    async def _of_index(self, done: IndexStep) -> Step:
        findings = [(Kind.INDEX, each) for each in done.faults]
        findings += [(Kind.CHANNEL, each) for each in done.channel_faults]
        if done.faults:
            await self._read_index_again()
        return Step(done.checked_count, None if done.is_last else FIRST, findings)

    async def _read_index_again(self) -> None:
        now_s = time.monotonic()
        if self._read_again_at_s is None or now_s - self._read_again_at_s >= READ_AGAIN_S_MIN:
            self._read_again_at_s = now_s
            await self._index.read_again()
            self.read_again_count += 1

    # ---- the place, across restarts

    def _remember(self) -> None:
        """Go on where the last process stopped. The index was read anew: its stages begin again."""
        self.current, self.last, findings = self._saved()
        for finding in findings:
            self.findings.restore(finding)
        if self.current.stage not in self._stages and self.current.stage:
            self.current = Pass()
        for stage in self._index_stages():
            if self.current.checked.pop(stage.name, None) is not None:
                self.current.stage, self.current.place = self._index_stages()[0].name, FIRST

    def _saved(self) -> tuple[Pass, Pass | None, list[Finding]]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
            if known["database_id"] == self._store.database_id:
                findings = [
                    Finding(**{**each, "kind": Kind(each["kind"])}) for each in known["findings"]
                ]
                last = Pass(**known["last"]) if known["last"] else None
                return Pass(**known["current"]), last, findings[:FINDINGS_MAX]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        return Pass(), None, []

    def _keep_place(self) -> None:
        if not self._checks_store:
            return
        known = {
            "database_id": self._store.database_id,
            "current": asdict(self.current),
            "last": asdict(self.last) if self.last else None,
            "findings": [asdict(each) for each in self.findings.open()],
        }
        draft = self._path.with_suffix(".new")
        try:
            draft.write_text(json.dumps(known), encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            _log.warning("the position of the audit was not saved: %s", error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
