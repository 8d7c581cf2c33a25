"""Puts the packages of the checkout under one name into a wheel (docs/decisions/0034-one-name-in-a-wheel.md)."""

import ast
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {
    "sdstore": "",
    "app": "app",
    "recon": "recon",
    "pipeline": "pipeline",
    "migrations": "app/store/migrations",
    "proto": "wire/proto",
}
"""Folders of the checkout and where `sdstore` has them in a wheel."""

RENAMED = ("app", "recon", "pipeline")
"""In a wheel `sdstore.app`, `sdstore.recon` and `sdstore.pipeline`."""


class OneName(BuildHookInterface):
    """Gives a wheel copies whose imports have the new names; an editable one has the checkout itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See `BuildHookInterface`. Raises ValueError."""
        self._folder = TemporaryDirectory(prefix="sdstore-wheel-")
        if version == "editable":
            return
        copies = Path(self._folder.name)
        for folder, place in PLACES.items():
            shutil.copytree(Path(self.root, folder), copies / place, dirs_exist_ok=True)
        for path in copies.rglob("*.py"):
            path.write_text(renamed(path.read_text(encoding="utf-8")), encoding="utf-8")
        build_data["force_include"][str(copies)] = "sdstore"

    def finalize(self, *_: object) -> None:
        """See `BuildHookInterface`."""
        self._folder.cleanup()


def renamed(source: str) -> str:
    """The module with the names in a wheel, line by line as before. Raises ValueError."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RENAMED:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = re.sub(r"^(\s*from )", r"\1sdstore.", line)
        elif isinstance(node, ast.Import) and any(
            each.name.split(".")[0] in RENAMED for each in node.names
        ):
            raise ValueError(f"`{ast.unparse(node)}`: write `from PACKAGE import NAME`")
    return "".join(lines)
