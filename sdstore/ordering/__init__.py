"""The Autobase order of a channel: a confirmed prefix that never changes, and a tentative tail."""

from sdstore.ordering.order import Breach, BreachKind, Change, Ordering, OrderingError, Roles
from sdstore.ordering.quorums import degrees

__all__ = ["Breach", "BreachKind", "Change", "Ordering", "OrderingError", "Roles", "degrees"]
