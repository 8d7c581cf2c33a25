"""Faults planted in the orders that a node serves."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, before, instead, nothing

_PAGES = ("tests/app/http/test_order.py",)
_LIVE = ("tests/app/http/test_live_confirmations.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _PAGES) -> Fault:
    return Fault(f"orders: {name}", f"app.orders:{seam}", plant, tests)


async def _read_nothing(*_: Any) -> None:
    pass


def _keep_hashes(right: Any) -> Any:
    def wrong(order: Any, item: Any) -> None:
        kept = list(order._hashes)
        right(order, item)
        order._hashes = kept

    return wrong


def _begin_once(right: Any) -> Any:
    def wrong(order: Any) -> None:
        if not hasattr(order, "known"):
            right(order)

    return wrong


def _skip_variants(right: Any) -> Any:
    def wrong(order: Any, item: Any) -> None:
        first = order.known.get(item.message_id)
        if first is None or first.digest == item.digest:
            right(order, item)

    return wrong


FAULTS = [
    _fault("a cursor is only a number", "Order.position", instead(lambda _, place: place.number)),
    _fault("a cursor is of any writers", "Wanted.name", instead("0" * 64)),
    _fault("a remembered hash outlives a change of the order", "Order._take", _keep_hashes),
    _fault("an order survives a database that went back", "Order.begin", _begin_once),
    _fault("variants are not compared", "Order._take", _skip_variants),
    _fault("lost content is not read again", "Orders._read_lost", instead(_read_nothing)),
    _fault("no order is evicted", "Orders._evict", nothing),
    _fault("an order may be of any size", "Order.give_up", nothing),
    Fault("orders: computing costs nothing", "app.access.rates:Budget.spend", nothing, _PAGES),
    _fault("a rewind is not remembered", "Order._note_rewind", nothing, _LIVE),
    _fault(
        "each live reader reads the channel itself",
        "Orders.followed",
        before(lambda orders, wanted, caller, _: (orders, wanted, caller, 2**62)),
        _LIVE,
    ),
]
