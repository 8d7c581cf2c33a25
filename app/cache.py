"""The one bounded cache: at most so many values, and so much of what they weigh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """Values by key; those that were used longest ago are dropped first.

    `weigh` measures a value when it comes. The newest value stays, however much it weighs. Belongs to one thread.
    """

    def __init__(
        self,
        items_max: int,
        weight_max: int = 0,
        weigh: Callable[[_Value], int] = lambda _: 0,
    ) -> None:
        self._items_max = items_max
        self._weight_max = weight_max
        self._weigh = weigh
        self._values: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def get(self, key: _Key) -> _Value | None:
        """The value of a key, which is used by this; None: it is not here."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: _Key, value: _Value) -> None:
        """Keep a value, in place of that of the same key."""
        self.drop(key)
        weight = self._weigh(value)
        self._values[key] = value, weight
        self._weight += weight
        while len(self._values) > 1 and (
            len(self._values) > self._items_max or self._weight > self._weight_max
        ):
            _, (_, dropped) = self._values.popitem(last=False)
            self._weight -= dropped

    def drop(self, key: _Key) -> None:
        """Forget the value of a key, if there is one."""
        if key in self._values:
            self._weight -= self._values.pop(key)[1]

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._weight = 0
