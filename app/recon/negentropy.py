"""Negentropy v1 for clients: one message in, one out, per channel."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import numpy as np

from app.errors import Code, Problem
from app.recon.budget import ReconBudgets
from app.recon.index import VIEW_COST_MIN, NodeIndex
from app.server.limits import Limits
from recon.elements import OrderWindow, order_of_lamport
from recon.errors import RemoteProtocolError
from recon.negentropy import Negentropy, Records

THREAD_RECORDS_MIN = 50_000
"""From this size on an answer takes milliseconds, so a thread computes it."""

THREAD_BODY_BYTES_MIN = 8_192
"""From this size on reading a message takes as long: a range can take only 3 bytes."""

COST_PER_BYTE = 4
"""The cost of a byte of a message, in hashed elements: empty ranges cost 6, lists almost nothing."""

_SIGN = np.uint64(1 << 63)

_Name = tuple[str, int | None, int]  # of a set: channel, Lamport timestamp from which on, divisor
_INT64_MAX = (1 << 63) - 1


class NegentropyEndpoint:
    """Answers messages; caches the sorted records of recently requested channels."""

    def __init__(self, index: NodeIndex, limits: Limits, budgets: ReconBudgets) -> None:
        self._index = index
        self._limits = limits
        self._budgets = budgets
        self._records: OrderedDict[_Name, tuple[int, Records]] = OrderedDict()

    async def answer(
        self,
        body: bytes,
        channel_id: str,
        from_lamport: int | None,
        divisor: int,
        caller_name: str,
    ) -> bytes:
        """The answer to a message about the entries of a channel from a Lamport timestamp on.

        The timestamps of the records are the Lamport timestamps divided by `divisor`.
        Raises Problem: `invalid_negentropy_message`, `recon_budget_spent`.
        """
        self._budgets.check(caller_name)
        self._budgets.views.spend(caller_name, COST_PER_BYTE * len(body))
        await self._index.catch_up()
        records = self._channel_records((channel_id, from_lamport, divisor), caller_name)
        server = Negentropy(
            records,
            frame_limit_bytes=self._limits.negentropy_reply_bytes_max,
            message_bytes_max=self._limits.negentropy_body_bytes_max,
            ranges_max=self._limits.negentropy_ranges_max,
        )
        try:
            if len(records) < THREAD_RECORDS_MIN and len(body) < THREAD_BODY_BYTES_MIN:
                answer = server.respond(body)
            else:
                answer = await asyncio.to_thread(server.respond, body)
        except RemoteProtocolError as error:
            raise Problem(
                Code.INVALID_NEGENTROPY_MESSAGE, str(error), extra={"fault": error.code}
            ) from None
        self._budgets.replies.spend(caller_name, len(answer))
        return answer

    def _channel_records(self, name: _Name, caller_name: str) -> Records:
        channel_id, from_lamport, divisor = name
        lower = 0 if from_lamport is None else order_of_lamport(from_lamport)
        elements_count = len(self._index.elements)
        known_count, records = self._records.get(name, (-1, None))
        if records is None or known_count != elements_count:
            orders, digests = self._index.channel_elements(channel_id, OrderWindow(lower, None))
            if records is None or len(records) != len(orders):
                self._budgets.views.spend(caller_name, VIEW_COST_MIN + len(orders))
                lamports = (orders ^ _SIGN).view(np.int64)
                if divisor > 1:
                    lamports = lamports // min(divisor, _INT64_MAX)
                records = Records.from_lamports(lamports, digests)
        self._remember(name, elements_count, records)
        return records

    def _remember(self, name: _Name, elements_count: int, records: Records) -> None:
        self._records[name] = elements_count, records
        self._records.move_to_end(name)
        if len(self._records) > self._limits.negentropy_channels_max:
            self._records.popitem(last=False)
