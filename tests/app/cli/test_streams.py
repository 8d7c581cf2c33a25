"""Standard streams that are pipes, closed or full, and files that are none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from app.cli.demo import conversation
from app.cli.files import delimited
from tests.support.cli import Result, cli, command, process

FILE = b"".join(delimited(item.frame) for item in conversation(1_000, 4))  # no pipe holds that much

FILE_KIB_MAX = 300  # more than an empty store, less than one of these messages


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store."""
    folder = tmp_path_factory.mktemp("data")
    assert cli("import", "-", "--data-dir", folder, stdin=FILE).code == 0
    return folder


def shell(redirection: str, *arguments: object) -> Result:
    """Run `sdstore ARGUMENTS` with streams that the shell redirects."""
    script = ("bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "bash")
    done = subprocess.run((*script, *command(*arguments)), capture_output=True, check=False)
    return Result(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode())


@pytest.mark.parametrize("output", [["-"], ["-", "--format", "ndjson"], ["/dev/stdout"]])
def test_a_reader_that_has_seen_enough_is_no_error(data: Path, output: list[str]) -> None:
    result = shell("| head -c 10", "export", *output, "--data-dir", data)
    assert (result.code, len(result.out), result.err) == (0, 10, "")


@pytest.mark.parametrize(
    ("redirection", "arguments", "code", "word"),
    [
        (">&-", ["version"], 6, "io_error"),
        (">&-", ["export", "-"], 6, "io_error"),
        (">/dev/full", ["version"], 6, "io_error"),
        (">/dev/full", ["export", "-"], 6, "io_error"),
        ("<&-", ["import", "-"], 2, "cannot_read"),
        ("2>&-", ["get", "--digest", "zz", "x"], 2, ""),
        ("2>/dev/full", ["get", "--digest", "zz", "x"], 2, ""),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_line(
    data: Path, redirection: str, arguments: list[str], code: int, word: str
) -> None:
    folder = ["--data-dir", str(data)] if arguments[-1] == "-" else []
    result = shell(redirection, *arguments, *folder)
    assert (result.code, result.err.count("\n")) == (code, 1 if word else 0)
    assert word in result.err


def test_a_full_disk_is_one_line_and_6(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "messages.ldp"
    file.write_bytes(FILE)
    for code, *verb in (
        ("disk_full", "import", file, "--data-dir", tmp_path / "new"),
        ("disk_full", "backup", tmp_path / "copy.db", "--data-dir", data),
        ("io_error", "export", tmp_path / "copy.ldp", "--data-dir", data),
    ):
        script = ("bash", "-c", f'ulimit -f {FILE_KIB_MAX}; "$@"', "bash")
        done = subprocess.run((*script, *command(*verb)), capture_output=True, check=False)
        assert (done.returncode, done.stderr.count(b"\n")) == (6, 1), done.stderr
        assert code.encode() in done.stderr
    assert not list(tmp_path.glob("copy.db*"))
    assert cli("export", tmp_path / "copy.ldp", "--data-dir", data).code == 0
    assert (tmp_path / "copy.ldp").read_bytes() == FILE


def test_a_file_name_of_any_bytes_is_printed(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "\udcff.ldp"
    assert process("export", file, "--data-dir", data).code == 0
    assert process("export", file, "--data-dir", data, "--json").json["file"] == str(file)


def test_devices_and_pipes_are_exported_to(data: Path, tmp_path: Path) -> None:
    assert shell("| cat", "export", "/dev/stdout", "--data-dir", data).out.encode("latin-1") == FILE
    assert cli("export", "/dev/null", "--data-dir", data).code == 0
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    copy = tmp_path / "copy"
    with copy.open("wb") as target, subprocess.Popen(("cat", str(fifo)), stdout=target):
        assert cli("export", fifo, "--data-dir", data).code == 0
    assert copy.read_bytes() == FILE
