"""A bounded cache of views. The responder is stateless; this only saves it rebuilding.

Bounded in elements, because a view's memory is proportional to them, and in number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from recon.index import RangeIndex
from recon.ranges import OrderWindow
from recon.session import SessionKey
from recon.view import View

CacheKey = tuple[bytes, frozenset[int] | None, OrderWindow]


class ViewCache:
    """Least recently used views out first. Not thread-safe: one event loop owns it."""

    def __init__(self, index: RangeIndex, *, views_max: int = 32, elements_max: int = 1 << 24):
        self._index = index
        self._views_max = views_max
        self._elements_max = elements_max
        self._views: OrderedDict[CacheKey, View] = OrderedDict()

    def __len__(self) -> int:
        return len(self._views)

    def holds(self, key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> bool:
        """Whether `get` would be cheap (budgets of callers count the others)."""
        return _cache_key(key, groups, window) in self._views

    def get(self, key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> View:
        """The view, up to date: cached and refreshed, or built."""
        name = _cache_key(key, groups, window)
        view = self._views.pop(name, None)
        if view is None:
            view = self._index.view(key, groups, window)
        else:
            view.refresh()
        self._views[name] = view
        self._evict()
        return view

    def _evict(self) -> None:
        total = sum(len(view) for view in self._views.values())
        while len(self._views) > 1 and (
            len(self._views) > self._views_max or total > self._elements_max
        ):
            _, oldest = self._views.popitem(last=False)
            total -= len(oldest)


def _cache_key(key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> CacheKey:
    return key.raw, None if groups is None else frozenset(groups), window
