"""The HTTP interface: one gateway around every route, FastAPI for those that are not hot."""
