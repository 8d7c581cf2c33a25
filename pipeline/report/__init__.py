"""The report on a snapshot's channels: tables, pictures, one page."""
