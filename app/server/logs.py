"""The log of a node: one event per line on stderr, and the audit log of what operators do.

A line has the ID of the request that it belongs to, and that of the session. The node makes both IDs;
nothing that a caller sends becomes one. No line has a secret or the content of a message.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # verbs that call a node import this module, and need no pydantic
    from app.server.settings import Settings

# Libraries that log each step and each request at the level "info", and headers at "debug".
TALKATIVE = ("alembic", "asyncio", "httpx", "httpcore", "hpack", "psycopg")
# While the database is away it warns several times a second; the node says so once.
POOL = "psycopg.pool"

AUDIT = logging.getLogger("sdstore.audit")
"""One line for each request of an operator's route that can change something."""

TARGET_CHARS_MAX = 500
"""Of a path in the audit log: longer than every ID and URL, and short enough for one line."""

_process = secrets.token_hex(4)
request_numbers = count(1)
current_request: ContextVar[int] = ContextVar("request", default=0)
"""The number of the request that this task serves. `app.http.front` sets it."""

_sync: ContextVar[str] = ContextVar("sync", default="")
_TOKEN = re.compile(r"\b(sds_[0-9A-Za-z]+)_[0-9A-Za-z]+")


def printable(text: str) -> str:
    """The text with control characters escaped as in JSON, so that it cannot move a cursor or fake a line.

    They are those of C0 and C1, separators of lines, and characters that turn the direction of text.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def begin_sync(sync_id: str) -> None:
    """What this task logs from here on belongs to a session."""
    _sync.set(sync_id)


def audit(*, who: str, address: str, action: str, target: str, status: int, code: str) -> None:
    """Write a line of the audit log: who did what to what, and how it ended.

    `status` 0: the caller hung up before it had an answer.
    """
    # An operator can paste a whole token where its ID belongs.
    shown = _TOKEN.sub(r"\1_***", target[:TARGET_CHARS_MAX])
    outcome = f"{status} {code}".strip()
    fields = {"who": who, "address": address, "action": action, "target": shown, "outcome": outcome}
    # The caller is a token's ID or an address; the target is a path, or what a handler says of it.
    AUDIT.info(
        "%s by %s at %s: %s: %s", action, who, address, shown, outcome, extra={"audit": fields}
    )


def audit_change(action: str, target: str, who: str = "a file") -> None:
    """Write a line of the audit log about a change that no caller made: the node finds it on its disk, or makes
    it by its settings."""
    fields = {"who": who, "address": "", "action": action, "target": target, "outcome": "seen"}
    AUDIT.info("%s: %s", action, target, extra={"audit": fields})


def shown_url(url: str) -> str:
    """A URL as an operator wrote it, for the audit log, without what can be a secret.

    User name, password, query and fragment are left out, and all after the scheme if it is not clear which
    is which.
    """
    base = re.split("[?#]", url, maxsplit=1)[0]
    scheme, slashes, _ = base.partition("//")
    start = f"{scheme}//" if slashes else ""
    if "@" in base:
        return f"{start}***@{base.rpartition('@')[2]}"
    return f"{start}***" if "@" in url else base


def start_logging(settings: Settings) -> None:
    """Log to stderr, at the level and in the format of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    logging.basicConfig(handlers=[handler])
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    AUDIT.setLevel(logging.INFO)  # whatever else is logged
    set_level(settings.log_level)


def set_level(level: str) -> None:
    """Log what is at least as severe."""
    logging.getLogger().setLevel(level.upper())
    logging.getLogger(POOL).setLevel(logging.NOTSET if level == "debug" else logging.CRITICAL)


class TextLines(logging.Formatter):
    """`TIME LEVEL [WORKER] LOGGER: MESSAGE`, followed by the traceback of a fault.

    What others chose, as a peer's error, cannot begin a line or reach the terminal: control characters
    are escaped. Lines of a traceback begin with spaces.
    """

    def formatException(self, ei: Any) -> str:  # noqa: N802 - a name of logging
        """See `logging.Formatter`."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a name of logging
        """See `logging.Formatter`."""
        worker = _worker_of(record)
        where = f"{worker} {record.name}" if worker else record.name
        return printable(f"{_time_of(record)} {record.levelname} {where}: {record.message}")


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, worker (where there are several), logger, request and sync
    (where there is one), message, the fields of an audited action, and the traceback of a fault."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        worker, number, sync_id = _worker_of(record), current_request.get(), _sync.get()
        audited: dict[str, Any] = getattr(record, "audit", {})
        document = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            **({"worker": worker} if worker else {}),
            "logger": record.name,
            **({"request": f"{_process}-{number}"} if number else {}),
            **({"sync": sync_id} if sync_id else {}),
            "message": record.getMessage(),
            **audited,
            **({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return printable(json.dumps(document, ensure_ascii=False))


def _time_of(record: logging.LogRecord) -> str:
    """ISO 8601 with milliseconds and this machine's offset from UTC."""
    moment = datetime.fromtimestamp(record.created).astimezone()
    return moment.isoformat(timespec="milliseconds")


def _worker_of(record: logging.LogRecord) -> str:
    name = record.processName or "MainProcess"
    return "" if name == "MainProcess" else name.replace(" ", "-")
