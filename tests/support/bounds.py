"""Options of participants with other bounds than the ones that every program has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from sdstore.sds.options import Bounds, ParticipantOptions
from sdstore.sds.repair import RepairBounds, RepairOptions

Kind = TypeVar("Kind", ParticipantOptions, RepairOptions)


def bounded(**given: Any) -> ParticipantOptions:
    """`ParticipantOptions`, also with bounds."""
    return altered(ParticipantOptions(), **given)


def bounded_repair(**given: Any) -> RepairOptions:
    """`RepairOptions`, also with bounds."""
    return altered(RepairOptions(), **given)


def altered(base: Kind, **given: Any) -> Kind:
    """`replace`, also of bounds: they are those of a subclass."""
    constants = {name for kind in (Bounds, RepairBounds) for name in vars(kind) if name[0] != "_"}
    bounds = {name: value for name, value in given.items() if name in constants}
    options = {name: value for name, value in given.items() if name not in constants}
    if not bounds:
        return replace(base, **options)
    kind = type("Bounded", (type(base),), bounds | {"__slots__": ()})
    fields = {name: getattr(base, name) for name in type(base).__dataclass_fields__}
    return kind(**(fields | options))
