"""Reading the settings again, for operators (`app.reload`)."""

from __future__ import annotations

from app.callers import Scope
from app.errors import Code, Problem, SettingsError
from app.http.call import Reply
from app.http.replies import json_only
from app.http.routing import AnsweredBy, CurrentCall, Routes
from app.reload import reload_settings

routes = Routes("settings", answered_by=AnsweredBy.ANY)


@routes.add("POST /v1/reload", Scope.ADMIN)
async def reload(call: CurrentCall) -> Reply:
    """Read the settings again: `changed` names those that were taken over, `needs_restart` the others.

    With several workers the one that answers has taken them over, and the others follow at once.
    """
    try:
        found = reload_settings(call.node)
    except SettingsError as error:
        raise Problem(Code.INVALID_SETTING, str(error)) from None
    if call.node.siblings is not None:
        call.node.siblings.board.reload()
    return json_only({"changed": found.changed, "needs_restart": found.needs_restart})
