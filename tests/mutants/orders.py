"""Faults planted in the orders that a node serves."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing

_PAGES = ("tests/app/http/test_order.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _PAGES) -> Fault:
    return Fault(f"orders: {name}", f"app.orders:{seam}", plant, tests)


def _begin_once(right: Any) -> Any:
    def wrong(order: Any) -> None:
        if not hasattr(order, "known"):
            right(order)

    return wrong


FAULTS = [
    _fault("a cursor is only a number", "Order.position", instead(lambda _, place: place.number)),
    _fault("an order survives a database that went back", "Order.begin", _begin_once),
    Fault("orders: computing costs nothing", "app.access.rates:Budget.spend", nothing, _PAGES),
]
