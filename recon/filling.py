"""Filling a frame: guessed by what each range is expected to cost, corrected by measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from recon.columns import F64

Built = TypeVar("Built", bound=Message)

_SHRINK = 0.97  # when a guess was too long: what is left of the proportional share


def fill(build: Callable[[int], Built], costs: F64, room: int) -> tuple[int, Built]:
    """How many ranges fit `room` bytes, at least one, and their message.

    `build(count)` makes the message of the first `count` ranges; `costs`, f64[n]: bytes that each
    is expected to add. A message that came out too long is cut in proportion to costs, not to
    numbers, so that few dear ranges before many cheap ones take two messages and not fifty.
    """
    spent = costs.cumsum()
    count = max(1, int(spent.searchsorted(room, side="right")))
    while True:
        message = build(count)
        size = message.ByteSize()
        if size <= room or count == 1:
            return count, message
        affordable = spent[count - 1] * (room / size * _SHRINK)
        count = max(1, min(count - 1, int(spent.searchsorted(affordable, side="right"))))
