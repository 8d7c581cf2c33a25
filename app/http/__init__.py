"""The HTTP interface: one shell around every route, hot handlers below it, FastAPI for the rest."""
