"""Generates the code of proto/: `python -m tools.proto FOLDER`.

protoc's code registers its messages in protobuf's default pool, which a program has once. Another library,
or the program itself, may have compiled a file of the same name or with the same messages, and then the second
import fails. So our modules take their pool from `sdstore.wire.pool`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCHEMAS = Path(__file__).parents[1] / "proto"
DEFAULT = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
OWN = "from sdstore.wire import pool as _descriptor_pool\n"


def generate(folder: Path) -> None:
    """Write the modules of all schemas."""
    outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
    schemas = map(str, sorted(SCHEMAS.glob("*.proto")))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SCHEMAS}"]
    subprocess.run([*protoc, *outputs, *schemas], check=True, timeout=60)  # noqa: S603 - our own files
    for module in folder.glob("*_pb2.py"):
        text = module.read_text(encoding="utf-8")
        if DEFAULT not in text:
            raise SystemExit(f"{module} does not import its pool as expected")
        module.write_text(text.replace(DEFAULT, OWN), encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
