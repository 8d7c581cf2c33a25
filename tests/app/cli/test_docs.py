"""docs/cli.md has every code, and every verb has its help."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from app.cli.output import Exit
from app.cli.program import MODULES
from app.errors import Code
from tests.support.cli import cli, process

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "cli.md"
SOURCES = [
    path
    for folder in ("app/cli", "sdstore", "sdstore/client", "sdstore/participant")
    for path in (ROOT / folder).glob("*.py")
]


def test_every_exit_code_is_explained() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for code in Exit:
        assert f"\n| {code.value} | " in text


def test_every_code_of_an_error_is_explained() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    found = re.findall(r'(?:CliError|BadItem|StoreError)\((?:\s*Exit\.\w+,)?\s*"(\w+)"', sources)
    found += re.findall(r'print_error\(f?"(\w+): ', sources)
    assert {"cannot_read", "malformed_file", "io_error", "insecure_bind", "timeout"} <= set(found)
    assert [code for code in found if code not in set(Code) and f"`{code}`" not in text] == []


@pytest.mark.parametrize("verb", MODULES)
def test_every_verb_has_help_and_json(verb: str) -> None:
    result = cli(verb, "--help")
    assert result.code == 0
    assert "--help" in result.out
    below = [line.split()[1] for line in result.out.splitlines() if line.startswith("│ ")]
    if "COMMAND" in result.out:
        for each in (name for name in below if name.isalpha() and name.islower()):
            assert "--json" in cli(verb, each, "--help").out
    else:
        assert "--json" in result.out


def test_help_lists_every_verb() -> None:
    listed = cli("--help").out
    assert all(f" {verb} " in listed for verb in MODULES)


def test_the_version_is_an_option_as_in_other_programs() -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, f"sdstore {version('sdstore')}\n")


def test_a_change_of_the_protocol_between_nodes_moves_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    major, minor, _ = map(int, project["version"].split("."))
    assert (major, minor) == (0, cli("version", "--json").json["recon_protocol"])
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    upgrading = page.partition("## Upgrading")[2].partition("\n## ")[0]
    assert "Peers" in upgrading
    assert Code.PEER_VERSION in upgrading


@pytest.mark.parametrize(
    ("line", "expected"),
    [("sdstore ga", {"gaps"}), ("sdstore gaps --no", {"--node"}), ("sdstore peers r", {"remove"})],
)
def test_a_shell_completes_verbs_and_options(line: str, expected: set[str]) -> None:
    asked = {
        "_SDSTORE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    result = process(**asked)
    assert (result.code, set(result.out.split())) == (0, expected)


def test_origins_that_may_call_are_a_flag_too() -> None:
    flags = ("--cors-origin", "https://a.example", "--cors-origin", "https://b.example")
    shown = cli("serve", *flags, "--show-config", "--json").json["cors_origins"]
    assert shown == {"value": ["https://a.example", "https://b.example"], "from": "flag"}


@pytest.mark.parametrize("module", ["app.cli.messages", "app.cli.sync", "app.cli.program"])
def test_the_verbs_of_a_running_node_start_without_the_packages_of_a_server(module: str) -> None:
    heavy = "numpy fastapi pydantic sqlalchemy uvicorn"
    code = f"import sys, app.cli.program, {module}; print(*sorted(set({heavy!r}.split()) & set(sys.modules)))"
    started = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert started.stdout.split() == []


def test_help_imports_no_numpy() -> None:
    code = """
import sys
from app.cli.main import main
sys.argv = ["sdstore", "--help"]
try:
    main()
except SystemExit:
    pass
sys.stderr.write(" ".join({"numpy", "typer"} & set(sys.modules)))
"""
    started = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "backfill" in started.stdout
    assert started.stderr == "typer"
