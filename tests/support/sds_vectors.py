"""Frames of other implementations, as recorded in tests/vectors."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent.parent / "vectors"


@functools.cache
def load(name: str) -> Any:
    """The content of tests/vectors/`name`.json."""
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def message_vectors() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recorded message as (name, vector); vector has `hex` and the writer's `fields`."""
    for file, key in (
        ("js_waku_messages", "vectors"),
        ("nim_sds_messages", "messages"),
        ("spec_versions_messages", "vectors"),
    ):
        for vector in load(file)[key]:
            yield f"{file}:{vector['name']}", vector


def valid_frames() -> list[bytes]:
    """Every recorded frame that holds a valid message, js-waku conversations included."""
    frames = [bytes.fromhex(vector["hex"]) for _, vector in message_vectors() if vector["fields"]]
    for scenario in load("js_waku_two_participants")["scenarios"]:
        frames += map(bytes.fromhex, scenario["frames"].values())
    return frames
