"""The node as an ordinary FastAPI application.

`uvicorn --factory sdstore.server:create_app` serves one with the settings of the environment. Any ASGI server does.
The bounds on connections, slow clients and headers are those of the server that `sdstore serve` starts; behind
another server they are that server's.
"""

from __future__ import annotations

from fastapi import FastAPI

from app.http.application import application, opened
from app.server.settings import Settings, load_settings

__all__ = ["create_app", "opened"]


def create_app(settings: Settings | None = None) -> FastAPI:
    """An application whose lifespan opens and closes the node. Raises SettingsError.

    Without `settings`, those of the `SDSTORE_*` environment. To mount it in another application, enter
    `opened(node_application)` in the lifespan of that one.
    """
    return application(load_settings()[0] if settings is None else settings)
