"""The app of docs/participant.md: the page prints it, it runs, and it is typed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import free_port
from tests.support.server import running_node

ROOT = Path(__file__).parent.parent
APP = ROOT / "examples" / "shopping.py"


@contextmanager
def person(name: str, url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, APP, name, url],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=folder,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_the_page_prints_the_app_whose_code_has_some_forty_lines() -> None:
    page = (ROOT / "docs" / "participant.md").read_text(encoding="utf-8")
    code = APP.read_text(encoding="utf-8")
    assert code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [each for each in code.splitlines() if each.strip()]
    assert len(lines) <= 45


def test_two_people_share_a_list_over_a_kill_and_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path / "node") as node:
        with person("ada", node.url, tmp_path) as ada, person("bob", node.url, tmp_path) as bob:
            say(ada, "bread")
            assert line(ada) == "ada: bread"
            assert line(bob) == "ada: bread"
            bob.kill()
            say(ada, "milk")
            assert line(ada) == "ada: milk"
            ada.communicate(timeout=30)  # its end gives what was sent a moment to reach the store
        with person("bob", node.url, tmp_path) as bob:
            assert [line(bob), line(bob)] == ["ada: bread", "ada: milk"]
            say(bob, "tea")
            assert line(bob) == "bob: tea"
            _, errors = bob.communicate(timeout=30)
            assert bob.returncode == 0, errors
            assert "-- all synced" in errors


def test_the_app_says_that_it_is_offline_and_what_waits_and_keeps_it(tmp_path: Path) -> None:
    with person("ada", f"http://127.0.0.1:{free_port()}", tmp_path) as ada:
        say(ada, "bread")
        assert line(ada) == "ada: bread"
        assert ada.stderr is not None
        waits = "-- no store answers (unreachable), 1 not yet stored\n"
        while (said := ada.stderr.readline()) != waits:
            assert said.startswith("-- no store answers")
    with running_node(tmp_path / "node") as node, person("ada", node.url, tmp_path) as ada:
        assert line(ada) == "ada: bread"
        with person("bob", node.url, tmp_path) as bob:
            assert line(bob) == "ada: bread"


@pytest.mark.slow
def test_the_examples_pass_the_strict_type_checker_as_code_of_an_app(tmp_path: Path) -> None:
    for name in ("shopping.py", "chat.py"):
        (tmp_path / name).write_bytes((APP.parent / name).read_bytes())
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "shopping.py", "chat.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def test_what_is_wrong_with_the_arguments_is_one_line(tmp_path: Path) -> None:
    for stores, said in (
        ("nonsense", "bad_argument: stores: nonsense is not a URL"),
        ("", "bad_argument"),
    ):
        with person("ada", stores, tmp_path) as ada:
            _, errors = ada.communicate(timeout=30)
            assert ada.returncode == 1
            assert errors.startswith(said)
            assert errors.count("\n") == 1
