"""The reference pages of docs/, made from the code: `python -m tools.reference`; a test compares them.

Settings, bounds and errors have a page each. Descriptions of settings and advice of errors are written beside
the code.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from pydantic_core import PydanticUndefined

from app.errors import Code, Problem
from app.live.hub import PACKED_STREAM_BYTES
from app.server.connection import READ_BYTES
from app.server.limits import DEFAULT_LIMITS, MIB, limits_table
from app.server.node import CHANGEABLE
from app.server.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"

_SETTINGS_HEAD = """# Settings

A setting comes from its default, the TOML file of `--config`, the environment (`SDSTORE_` and the name in
capitals, lists as `a,b`) or a flag; later sources win. An unknown name is an error in each. `sdstore serve
--show-config` prints each value and its source. A running node takes over those with a star at a
[reload](operations.md#changing-settings).
"""
_LIMITS_HEAD = """# Limits

Every queue, loop, cache and reply of a node has a bound. A value equal to its bound is accepted. `sdstore serve
--show-limits` prints all bounds with the reason of each; these are the ones of a message and a request:
"""
_BEHIND_REQUESTS = "header_bytes_max"
"""The first bound that is not of a message or a request."""
_SHARED_HEAD = """
## What all requests share

A bound per request does not bound many requests. These hold for one process, under any load
([decision 18](decisions/0018-shares-and-turns.md)); the index and the caches come on top.
"""
_ERRORS_HEAD = """# Errors

Every error is a problem document (RFC 9457, `application/problem+json`):

```json
{"type": "urn:sdstore:problem:not_found", "title": "Not found", "status": 404,
 "detail": "no such message is here", "code": "not_found"}
```

`code` is stable and meant for programs; `detail` is for people and can change. The same fault has the same code by
every path: alone, in a batch, in a reconciliation or in an import. A batch answers 200, and the outcome of each
rejected item contains its problem document. [cli.md](cli.md#codes-of-errors) has the codes of the command line.

"""


def settings_page() -> str:
    """Every setting: name, default, description."""
    lines = []
    for name, field in Settings.model_fields.items():
        is_made = field.default is PydanticUndefined
        default = "sqlite:///DATA_DIR/sdstore.db" if is_made else _shown(field.default)
        star = r"\*" if name in CHANGEABLE else ""
        lines.append(f"- `{name}`{star}{default and f' ({default})'}: {field.description}\n")
    return f"{_SETTINGS_HEAD}\n{''.join(lines)}"


def _shown(default: object) -> str:
    """A default as a settings file has it; "" for none and empty ones."""
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default in (None, [], {}) else str(default)


def limits_page() -> str:
    """The bounds that a caller meets, and the memory that all requests together can take."""
    named = takewhile(lambda row: row[0] != _BEHIND_REQUESTS, limits_table())
    node = _columns([(name, f"{value:,} {unit}") for name, value, unit, _ in named])
    return f"{_LIMITS_HEAD}\n{node}{_SHARED_HEAD}\n{_shared()}"


def _shared() -> str:
    """Memory that anybody can ask for, summed up from the bounds."""
    limits = DEFAULT_LIMITS
    beside = READ_BYTES + limits.header_bytes_max + limits.body_free_bytes
    rows = {
        "connections_max × (header_bytes_max + body_free_bytes + 16 KiB)": limits.connections_max
        * beside,
        "bodies_bytes_max": limits.bodies_bytes_max,
        "replies_bytes_max": limits.replies_bytes_max,
        "live_unread_bytes_max": limits.live_unread_bytes_max,
        "live_compressed_max × 144 KiB": limits.live_compressed_max * PACKED_STREAM_BYTES,
        "live_queue_bytes_max": limits.live_queue_bytes_max,
        "ingest_queue_bytes_max": limits.ingest_queue_bytes_max,
    }
    rows["all of these at once"] = sum(rows.values())
    return _columns([(name, f"{count // MIB:,} MiB") for name, count in rows.items()])


def _columns(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "```text\n" + "".join(f"{name:<{width}}  {value}\n" for name, value in rows) + "```\n"


def errors_page() -> str:
    """Every code: status, title, advice."""
    problems = [Problem(code, "") for code in Code]
    lines = [
        f"- `{each.code}` ({each.status}): {each.title}.{each.advice and f' {each.advice}'}\n"
        for each in problems
    ]
    return _ERRORS_HEAD + "".join(lines)


def pages() -> dict[str, str]:
    """The text that each page of reference should have, by its file name."""
    return {
        "settings.md": settings_page(),
        "limits.md": limits_page(),
        "errors.md": errors_page(),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
