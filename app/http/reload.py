"""Reading the settings again, for operators (`app.server.reload`)."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter

from app.errors import Code, Problem, SettingsError
from app.http.admission import Operator
from app.http.call import Reply
from app.http.models import Reloaded
from app.http.openapi import documented, reply
from app.http.replies import json_only
from app.http.routing import NodeRoute
from app.server.reload import reload_settings
from app.server.workers import WorkerPlace

router = APIRouter(tags=["settings"], route_class=NodeRoute)

WORKERS_WAIT_S = 10.0
"""How long the call waits for the other workers. They need milliseconds, unless one hangs or its settings
became invalid at this moment."""
_LOOK_S = 0.01


@router.post("/v1/reload", **documented({200: reply("Taken over", Reloaded)}))
async def reload(call: Operator) -> Reply:
    """Read the settings again: `changed` names those that were taken over, `needs_restart` the others.

    The reply comes when every worker of this service has taken them over.
    """
    try:
        found = reload_settings(call.node)
    except SettingsError as error:
        raise Problem(Code.INVALID_SETTING, str(error)) from None
    if call.node.worker is not None:
        await _all_reloaded(call.node.worker)
    return json_only({"changed": found.changed, "needs_restart": found.needs_restart})


async def _all_reloaded(worker: WorkerPlace) -> None:
    """Have all workers reload, and wait for it. Raises Problem: `not_ready`."""
    mark = worker.board.reload(worker.number)
    ends_s = time.monotonic() + WORKERS_WAIT_S
    while behind := worker.board.behind(mark):
        if time.monotonic() > ends_s:
            numbers = ", ".join(map(str, behind))
            detail = f"no new settings after {WORKERS_WAIT_S:g} s in workers {numbers}; see the log"
            raise Problem(Code.NOT_READY, detail)
        await asyncio.sleep(_LOOK_S)
