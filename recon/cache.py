"""A bounded cache of views. The responder is stateless; this only saves it rebuilding.

Bounded in number and in bytes; the view used last stays, however large it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from recon.index import RangeIndex
from recon.limits import VIEW_BYTES, VIEW_ELEMENT_BYTES, VIEW_GROUP_BYTES
from recon.ranges import OrderWindow
from recon.session import SessionKey
from recon.view import View

CacheKey = tuple[bytes, frozenset[int] | None, OrderWindow]


class ViewCache:
    """Least recently used views out first. Not thread-safe: one event loop owns it."""

    def __init__(self, index: RangeIndex, *, views_max: int, bytes_max: int):
        self._index = index
        self._views_max = views_max
        self._bytes_max = bytes_max
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
        total = sum(_bytes_of(*each) for each in self._views.items())
        while len(self._views) > 1 and (
            len(self._views) > self._views_max or total > self._bytes_max
        ):
            total -= _bytes_of(*self._views.popitem(last=False))


def _bytes_of(name: CacheKey, view: View) -> int:
    groups = name[1] or ()
    return VIEW_BYTES + VIEW_ELEMENT_BYTES * len(view) + VIEW_GROUP_BYTES * len(groups)


def _cache_key(key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> CacheKey:
    return key.raw, None if groups is None else frozenset(groups), window
