"""Reading server-sent events (the WHATWG text format), as far as nodes write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

EVENT_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON, with its names


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event; `event_id` is empty where it has none, `data` where an ID is all it has."""

    name: str
    event_id: str
    data: str


def parse_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Events of a stream of lines. Comments are passed over, IDs that come with one are not."""
    name, event_id, data = "message", "", ""
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data or event_id:
                yield ServerEvent(name, event_id, data)
            name, event_id, data = "message", "", ""
        elif field == "event":
            name = value
        elif field == "id":
            event_id = value
        elif field == "data" and len(data) + len(value) <= EVENT_BYTES_MAX:
            data = f"{data}\n{value}" if data else value
