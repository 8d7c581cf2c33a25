"""Ingest, the one door: every message enters the store here."""
