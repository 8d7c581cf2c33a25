"""The checked-in code is what protoc makes of proto/, and gets along with what others compile."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.proto import SCHEMAS, generate

ROOT = Path(__file__).parent.parent.parent
WIRE = ROOT / "sdstore" / "wire"


def test_generated_code_is_up_to_date_and_complete(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*_pb2.py*")}
    checked_in = {path.name: path.read_text(encoding="utf-8") for path in WIRE.glob("*_pb2.py*")}
    assert fresh == checked_in


PROGRAM = """
import importlib, sys
for package in sys.argv[1:]:
    for name in ("mvds", "participant", "recon", "sds", "sds_raw", "store"):
        importlib.import_module(f"{package}{name}_pb2")
import sds_pb2
from sdstore.wire import sds_pb2 as ours
theirs = sds_pb2.Message(message_id="m", content=b"x", added_by_them="y")
read = ours.Message.FromString(theirs.SerializeToString())
assert (read.message_id, read.content) == ("m", b"x")
assert sds_pb2.Message.FromString(read.SerializeToString()) == theirs
"""


@pytest.mark.parametrize("order", [("", "sdstore.wire."), ("sdstore.wire.", "")])
def test_a_program_with_schemas_of_the_same_names_works_beside_ours(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    for schema in SCHEMAS.glob("*.proto"):
        text = schema.read_text(encoding="utf-8")
        if schema.name == "sds.proto":
            text = text.replace(
                "message Message {", "message Message {\n  string added_by_them = 999;", 1
            )
            assert "added_by_them" in text
        (tmp_path / schema.name).write_text(text, encoding="utf-8")
    schemas = [each.name for each in tmp_path.glob("*.proto")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", *schemas]
    subprocess.run(protoc, check=True, timeout=60, cwd=tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *order],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
