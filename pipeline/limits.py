"""Bounds of the files of a snapshot."""

RANGE_ENTRIES = 65_536
"""Rows: 20 MB of 300-byte frames. 10^10 entries make 153,000 files and a manifest of 95 MB."""

RANGE_BYTES = 96 * 1024 * 1024
"""Bytes of rows in memory in one task; writing them takes about three times as much."""
