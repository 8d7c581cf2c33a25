"""The node as a FastAPI application (docs/http.md, "In your own application"). Needs the extra `server`."""

from sdstore.errors import extra

with extra("server"):
    from app.main import create_app, opened
    from app.server.settings import Settings

__all__ = ["Settings", "create_app", "opened"]
