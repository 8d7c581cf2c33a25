"""The SQL store: entries, frames, claims and gaps on SQLite or PostgreSQL."""
