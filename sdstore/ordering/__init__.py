"""The Autobase order of a channel: a confirmed prefix that never changes, and a tentative tail."""

from sdstore.ordering.order import (
    PRECONDITIONS,
    Breach,
    BreachKind,
    Change,
    Indexer,
    Ordering,
    OrderingError,
    Proof,
    Roles,
    RolesChange,
    WaitsFor,
    degrees,
)

__all__ = [
    "PRECONDITIONS",
    "Breach",
    "BreachKind",
    "Change",
    "Indexer",
    "Ordering",
    "OrderingError",
    "Proof",
    "Roles",
    "RolesChange",
    "WaitsFor",
    "degrees",
]
