"""The checked-in code is what protoc makes of proto/."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WIRE = ROOT / "sdstore" / "wire"


def test_generated_code_is_up_to_date_and_complete(tmp_path: Path) -> None:
    schemas = sorted((ROOT / "proto").glob("*.proto"))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*protoc, *outputs, *map(str, schemas)], check=True, timeout=60)
    fresh = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*_pb2.py*")}
    checked_in = {path.name: path.read_text(encoding="utf-8") for path in WIRE.glob("*_pb2.py*")}
    assert fresh == checked_in
