"""The routes of a node, as tests go through them."""

from __future__ import annotations

from typing import NamedTuple

from app.access.callers import Scope
from app.http.admission import ID_PARAMETERS, admission_of
from app.http.application import Application
from app.server.settings import Settings
from app.server.sharing import Turns


class Route(NamedTuple):
    """One operation: `template` as in "/v1/messages/{message_id}"."""

    method: str
    template: str
    scope: Scope
    turns: Turns | None

    @property
    def query_parameter(self) -> str | None:
        """The path parameter that a caller can pass in the query instead."""
        if self.method != "GET":
            return None
        segments = self.template.split("/")
        return next((each for each in ID_PARAMETERS if f"{{{each}}}" in segments), None)

    @property
    def query_template(self) -> str:
        """The template without the segment of `query_parameter`."""
        return self.template.replace(f"/{{{self.query_parameter}}}", "")


def _routes() -> tuple[Route, ...]:
    routes = Application(Settings()).node_routes
    found = ((each.method, each.path_format, admission_of(each)) for each in routes)
    return tuple(Route(*names, demanded.scope, demanded.turns) for *names, demanded in found)


ROUTES = _routes()
