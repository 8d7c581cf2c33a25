"""The paths of a snapshot's files, relative to its folder."""

from __future__ import annotations

ENTRIES_FOLDER = "entries"
CLAIMS_FOLDER = "claims"
CHANNELS_FILE = "channels.parquet"
LOGS_FILE = "logs.parquet"  # of `snapshot logs`, in a folder of its own
README_FILE = "README.md"
PROTO_FILES = ("proto/sds.proto", "proto/sds_raw.proto")


def entries_path(day: str, first: int, last: int) -> str:
    """The file of the entries from `first` to `last` that arrived on `day`."""
    return f"{ENTRIES_FOLDER}/day={day}/{first:019d}-{last:019d}.parquet"


def claims_path(first: int, last: int) -> str:
    """The file of the claims from `first` to `last`."""
    return f"{CLAIMS_FOLDER}/{first:019d}-{last:019d}.parquet"
