"""`snapshot list` and `snapshot prune`: the snapshots in a folder, with their parents.

Every snapshot is complete, because files that it shares with its parent are hard links. So any
snapshot of a chain can be restored, and removing one does not affect the others.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from app.disk import sync_path
from pipeline import manifest as manifests
from pipeline.errors import ManifestError
from pipeline.manifest import Manifest
from pipeline.publish import abandoned

_PRUNED = ".pruned"
_LEFT_OVER = "left by an export or a prune that was killed: `prune` removes it"


@dataclass(frozen=True, slots=True)
class Listed:
    """A folder with a manifest, or what a killed export left. If it is damaged or unfinished, `manifest`
    is None and `fault` says why."""

    folder: Path
    manifest: Manifest | None
    fault: str | None = None


def list_snapshots(folder: Path) -> list[Listed]:
    """The snapshots in `folder`, oldest first; damaged and unfinished ones come before all others."""
    candidates = [each.parent for each in folder.glob(f"*/{manifests.FILE_NAME}")]
    visible = [each for each in candidates if not each.name.startswith(".")]
    left_over = [Listed(each, None, _LEFT_OVER) for each in (*abandoned(folder), *_pruned(folder))]
    return sorted([*left_over, *map(_listed, visible)], key=_age)


def _listed(folder: Path) -> Listed:
    try:
        return Listed(folder, manifests.load(folder))
    except ManifestError as error:
        return Listed(folder, None, str(error))


def _age(listed: Listed) -> tuple[str, str]:
    created_at = "" if listed.manifest is None else listed.manifest.created_at
    return created_at, listed.folder.name


def prune_snapshots(folder: Path, keep_count: int) -> list[Path]:
    """Remove all but the newest `keep_count` snapshots in `folder`; returns the removed ones.

    Damaged ones are neither counted nor removed: the operator must look at them. A snapshot loses its
    name before its files, so a killed prune leaves no partial snapshot. Leftovers of killed prunes and
    exports are removed too, and come first in the result.
    """
    removed = []
    for left_over in chain(abandoned(folder), _pruned(folder)):  # one by one, under its lock
        shutil.rmtree(left_over)
        removed.append(left_over)
    whole = [each.folder for each in list_snapshots(folder) if each.manifest is not None]
    doomed = whole[: max(len(whole) - keep_count, 0)]
    for each in doomed:
        hidden = each.rename(each.with_name(f".{each.name}{_PRUNED}"))
        sync_path(folder)
        shutil.rmtree(hidden)
    return [*removed, *doomed]


def _pruned(folder: Path) -> list[Path]:
    """What killed prunes left."""
    return sorted(folder.glob(f".*{_PRUNED}"))
