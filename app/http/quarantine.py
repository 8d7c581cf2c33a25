"""The quarantine, for operators: what the policy kept apart is listed, shown, released or dropped."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Query

from app.hexadecimal import hex_bytes
from app.http.admission import Operator
from app.http.call import Reply
from app.http.models import HeldMessage, HeldPage, Released
from app.http.openapi import documented, reply
from app.http.replies import json_only, rfc3339
from app.http.routing import NodeRoute
from app.ingest.quarantine import Held
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.jsonform import to_json

router = APIRouter(tags=["quarantine"], route_class=NodeRoute)

_log = logging.getLogger(__name__)

_Limit = Annotated[int, Query(ge=1, le=DEFAULT_LIMITS.page_items_max)]
_AfterNumber = Annotated[int, Query(ge=0, le=2**63 - 1, description="the `next` of the last page")]


@router.get("/v1/quarantine", **documented({200: reply("A page of the quarantine", HeldPage)}))
async def list_quarantine(
    call: Operator, after: _AfterNumber = 0, limit: _Limit = DEFAULT_LIMITS.page_items_default
) -> Reply:
    """Messages in the quarantine, oldest first, without their content."""
    held = await asyncio.to_thread(call.node.quarantine.page, after, limit)
    following = held[-1].number if len(held) == limit else None
    return json_only({"messages": [_document(each) for each in held], "next": following})


@router.get(
    "/v1/quarantine/{digest:segment}", **documented({200: reply("The message", HeldMessage)})
)
async def show_quarantined(call: Operator, digest: str) -> Reply:
    """One message in the quarantine, with its content."""
    entry = await asyncio.to_thread(call.node.quarantine.entry, hex_bytes(digest, "a digest"))
    return json_only({"digest": entry.digest.hex(), "message": to_json(entry.message)})


@router.post(
    "/v1/quarantine/{digest:segment}/release", **documented({200: reply("Released", Released)})
)
async def release_quarantined(call: Operator, digest: str) -> Reply:
    """Store a message, as if it came now; the policy does not see it again."""
    quarantine = call.node.quarantine
    async with quarantine.deciding():
        entry = await asyncio.to_thread(quarantine.entry, hex_bytes(digest, "a digest"))
        outcome = await call.node.door.release(entry)
        await asyncio.to_thread(quarantine.forget, entry.digest)
    _log.info("%s released message %s", call.caller.name, entry.digest.hex())
    return json_only({"digest": entry.digest.hex(), "outcome": outcome.kind})


@router.delete("/v1/quarantine/{digest:segment}", **documented({204: reply("Dropped")}))
async def drop_quarantined(call: Operator, digest: str) -> Reply:
    """Delete a message; it is refused from now on."""
    quarantine = call.node.quarantine
    async with quarantine.deciding():
        await asyncio.to_thread(quarantine.drop, hex_bytes(digest, "a digest"))
    _log.info("%s dropped message %s", call.caller.name, digest.lower())
    return Reply(204, [])


def _document(held: Held) -> dict[str, object]:
    return {
        "digest": held.digest.hex(),
        "message_id": held.message_id,
        "channel_id": held.channel_id,
        "frame_bytes": held.frame_bytes,
        "way": held.way,
        "reason": held.reason,
        "held_at": rfc3339(held.held_at_ms),
    }
