"""The HTTP interface: a FastAPI application, and the server that `sdstore serve` starts for it."""
