"""Each member's share of a bounded table: a member that fills the table loses its own entries.

A sender's name costs nothing, so those of whom no message was delivered with all its causes are strangers,
and the strangers of a path of arrival have one account. They give way first: beside one known sender a flood of
invented names has at most a fifth of the table.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Member(NamedTuple):
    """Whom a message counts against. `account`: the sender, or empty for strangers. `source`: the sender, or for
    requests the ID of the message that names what to ask for."""

    path: str = ""
    account: str = ""
    source: str = ""

    def naming(self, message_id: str) -> Member:
        """Against whom counts what this message of the member names."""
        return Member(self.path, self.account, message_id)


STRANGERS_WEIGHT = 4
"""What strangers hold counts as so many times as much. With less, a known sender whose messages wait for those of
a flood has more of a small table than the flood."""

NOBODY = Member()
"""For what was restored: nothing says who named it."""


class Shares:
    """The keys of a table by the member that they count against, with a cost each."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._keys: dict[Member, dict[str, int]] = {}  # in the order of arrival
        self._costs: dict[Member, int] = {}
        self._accounts: dict[tuple[str, str], int] = {}
        # Members of an account by cost, the last come first: a flood has one for each invented name.
        self._heaps: dict[tuple[str, str], list[tuple[int, int, Member]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def member(self, key: str) -> Member:
        """Whom a key counts against."""
        return self._members[key]

    def count(self, member: Member) -> int:
        """The number of keys that count against the same account and source."""
        return len(self._keys.get(member, ()))

    def keys_of_stranger(self, sender_id: str) -> list[str]:
        """The keys of a sender on all paths, as long as it was a stranger."""
        paths = {path for path, _ in self._accounts}
        return [key for path in paths for key in self._keys.get(Member(path, "", sender_id), ())]

    def add(self, key: str, member: Member, cost: int = 1) -> None:
        """Add a key that is not there."""
        self._members[key] = member
        self._keys.setdefault(member, {})[key] = cost
        self._change(member, cost)

    def discard(self, key: str) -> None:
        """Remove a key if it is there."""
        member = self._members.pop(key, None)
        if member is not None:
            self._change(member, -self._keys[member].pop(key))

    def _change(self, member: Member, cost: int) -> None:
        account = member[:2]
        self._costs[member] = self._costs.get(member, 0) + cost
        self._accounts[account] = self._accounts.get(account, 0) + cost
        heap = self._heaps.setdefault(account, [])
        if self._keys[member]:
            self._count += 1
            heappush(heap, (-self._costs[member], -self._count, member))
        else:
            del self._keys[member], self._costs[member]
        if not self._accounts[account]:
            del self._accounts[account], self._heaps[account]
        elif len(heap) > 4 * len(self._members) + 64:  # mostly outdated
            now = [each for each in heap if self._costs.get(each[2]) == -each[0]]
            heap[:] = {each[2]: each for each in now}.values()
            heapify(heap)

    def _weight(self, account: tuple[str, str]) -> int:
        return self._accounts[account] * (1 if account[1] else STRANGERS_WEIGHT)

    def first_to_go(self) -> str:
        """The key that gives way at a bound: the oldest of the sender with most.

        This sender is one of the account with most, on the path with most. Of equals the one that came
        last gives way, so an honest message stays if a flood of invented names comes after it.
        """
        paths: dict[str, int] = {}
        for (path, _), cost in reversed(self._accounts.items()):
            paths[path] = paths.get(path, 0) + cost
        most = max(paths, key=paths.__getitem__)
        accounts = [each for each in reversed(self._accounts) if each[0] == most]
        heap = self._heaps[max(accounts, key=self._weight)]
        while self._costs.get(heap[0][2]) != -heap[0][0]:
            heappop(heap)
        return next(iter(self._keys[heap[0][2]]))
