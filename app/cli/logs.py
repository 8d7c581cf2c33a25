"""The log of a node: one event a line on stderr, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

from app.settings import Settings

# Libraries that tell each step and each request at the level "info".
TALKATIVE = ("alembic", "httpx", "httpcore")
# It warns several times a second of a database that is away; the node says so once.
POOL = "psycopg.pool"


def start_logging(settings: Settings) -> None:
    """Log to stderr, as talkative and in the form that the settings say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    if settings.log_level != "debug":
        logging.getLogger(POOL).setLevel(logging.CRITICAL)


class TextLines(logging.Formatter):
    """`TIME LEVEL [WORKER] LOGGER: MESSAGE`, and below it the traceback of a fault."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a name of logging
        """See `logging.Formatter`."""
        worker = _worker_of(record)
        where = f"{worker} {record.name}" if worker else record.name
        return f"{_time_of(record)} {record.levelname} {where}: {record.message}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, worker (where there are several), logger, message, and
    the traceback of a fault."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        worker = _worker_of(record)
        document = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            **({"worker": worker} if worker else {}),
            "logger": record.name,
            "message": record.getMessage(),
            **({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return json.dumps(document, ensure_ascii=False)


def _time_of(record: logging.LogRecord) -> str:
    """ISO 8601 with milliseconds and the offset of this machine's zone."""
    moment = datetime.fromtimestamp(record.created).astimezone()
    return moment.isoformat(timespec="milliseconds")


def _worker_of(record: logging.LogRecord) -> str:
    name = record.processName or "MainProcess"
    return "" if name == "MainProcess" else name.replace(" ", "-")
