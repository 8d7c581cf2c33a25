"""The ranges of the parent that an incremental export keeps or rewrites.

New entries become new ranges. Short ranges at the end are merged with them, so that many small
exports still make few files: a range is merged if it has at most `_MERGE_FACTOR` times the elements
after it. Sizes then fall geometrically, and an entry is rewritten a logarithmic number of times.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.manifest import ClaimRange, EntryRange

_Range = EntryRange | ClaimRange
_MERGE_FACTOR = 2
_FULL_SHARE = 2  # a range more than half full is not merged again
_FULL_BYTES = 16 * 1024 * 1024  # compressed; large frames fill a range by bytes


def merged_tail(ranges: Sequence[_Range], new_count: int, rows_max: int) -> list[_Range]:
    """The ranges at the end of `ranges` to rewrite together with `new_count` new elements.

    The resulting files have about `rows_max` rows.
    """
    if not new_count:
        return []
    start = len(ranges)
    while start and _is_worth_merging(ranges[start - 1], new_count, rows_max):
        if getattr(ranges[start - 1], "day", None) != getattr(ranges[-1], "day", None):
            break  # a file holds one day, so merging across days saves no file
        start -= 1
        new_count += ranges[start].count
    return list(ranges[start:])


def _is_worth_merging(last: _Range, after_count: int, rows_max: int) -> bool:
    return (
        last.count <= _MERGE_FACTOR * after_count
        and last.count * _FULL_SHARE <= rows_max
        and last.file.bytes <= _FULL_BYTES
    )
