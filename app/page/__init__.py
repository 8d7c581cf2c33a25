"""The node's page at `/`: what the routes answer, for people."""
