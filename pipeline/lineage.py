"""`snapshot list` and `snapshot prune`: the snapshots in a folder, with their parents.

Every snapshot is complete, because files that it shares with its parent are hard links. So any
snapshot of a chain can be restored, and removing one does not affect the others.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from app.disk import sync_path
from pipeline import manifest as manifests
from pipeline.errors import ManifestError
from pipeline.manifest import Manifest
from pipeline.publish import remove_abandoned

_PRUNED = ".pruned"


@dataclass(frozen=True, slots=True)
class Listed:
    """A folder with a manifest. For a damaged one `manifest` is None and `fault` says why."""

    folder: Path
    manifest: Manifest | None
    fault: str | None = None


def list_snapshots(folder: Path) -> list[Listed]:
    """The snapshots in `folder`, oldest first; damaged ones come before all others."""
    candidates = [each.parent for each in folder.glob(f"*/{manifests.FILE_NAME}")]
    visible = [each for each in candidates if not each.name.startswith(".")]
    return sorted(map(_listed, visible), key=_age)


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
    exports are removed too.
    """
    remove_abandoned(folder)
    for left_over in folder.glob(f".*{_PRUNED}"):
        shutil.rmtree(left_over)
    whole = [each.folder for each in list_snapshots(folder) if each.manifest is not None]
    doomed = whole[: max(len(whole) - keep_count, 0)]
    for each in doomed:
        hidden = each.rename(each.with_name(f".{each.name}{_PRUNED}"))
        sync_path(folder)
        shutil.rmtree(hidden)
    return doomed
