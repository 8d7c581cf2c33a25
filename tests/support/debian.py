"""Programs of Debian packages, which tests install if they may."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def program(name: str, package: str = "") -> str:
    """The path of a program; its package, named alike unless said, is installed if it is missing.

    Skips where the tests may not install packages.
    """
    found = shutil.which(name)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package or name]
        quiet = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True}
        subprocess.run(install, check=False, timeout=300, **quiet)  # type: ignore[call-overload]
        found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found
