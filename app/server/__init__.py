"""The node put together, its settings and limits, its server and its processes."""
