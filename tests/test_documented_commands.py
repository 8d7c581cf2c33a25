"""Every command that README.md and docs/ show is run, as it stands, in a shell of its own.

docs/operations.md has a test of its own (tests/test_operations_page.py).
"""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from app.cli.demo import running_node
from app.cli.files import delimited
from app.cli.program import MODULES
from app.server.settings import load_settings
from recon.negentropy import Negentropy, Records
from sdstore.sds.codec import encode
from tests.support.cli import cli
from tests.support.federation import message

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_ELSEWHERE = {"operations.md"}
PASTE_S_MAX = 120
README_NODE = "http://127.0.0.1:8000"

# Blocks that no shell runs here, by their first line: why, and what runs them instead.
CANNOT_RUN = {
    "make run      # one node on http://127.0.0.1:8000, SQLite in ./data": (
        "sets up an environment; the targets are looked up, and the minute starts what they start"
    ),
    ".venv/bin/python examples/chat.py ada": (
        "needs a terminal for each person: tests/test_chat_example.py"
    ),
    "sdstore serve --public-url https://store.example --trusted-proxy 127.0.0.1": (
        "serves until it is stopped, behind a proxy: tests/app/http/test_real_proxies.py"
    ),
    "sudo sdstore --token-file /var/lib/sdstore/operator.token peers list": (
        "needs a node of another user: tests/app/cli/test_operator.py names the file"
    ),
    "sdstore indexer general --as server --file server.db --node http://127.0.0.1:8000": (
        "runs until it is stopped: tests/app/cli/test_indexer.py"
    ),
    "sdstore serve            # in one terminal": (
        "an app for several people, each at a terminal: tests/test_small_app.py"
    ),
    "sdstore quarantine list": ("needs messages in the quarantine: tests/app/test_policy.py"),
    'spark.read.format("sdstore").option("url", "sqlite:///data/sdstore.db").load()': (
        "lines of a Spark program: tests/pipeline/test_source.py and test_live.py run them"
    ),
}
PIPELINE = "sdstore snapshot export snapshots/monday --data-dir data"
NO_COMMAND = ("digest = BLAKE3", "frame_hash = BLAKE3", "claim_id = BLAKE3")


class Block(NamedTuple):
    """A piece of a document that is set apart; `language` is "" where it is indented."""

    document: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """Indented and fenced blocks of every document, without what is drawn or quoted."""
    for document in DOCUMENTS:
        if document.name in TESTED_ELSEWHERE:
            continue
        text = document.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield Block(document.name, found[1], found[2])
        text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        # Behind a blank line, and no continuation of a list's item.
        for found in re.finditer(r"(?<=\n\n)((?:    .*\n|\n(?=    ))+)", text):
            before = re.findall(r"^\S.*$", text[: found.start()], re.MULTILINE)
            if not re.match(r"(?:[-*]|\d+\.) ", before[-1]):
                yield Block(document.name, "", re.sub("^    ", "", found[1], flags=re.MULTILINE))


BLOCKS = list(blocks())


def first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def shell_blocks() -> list[Block]:
    return [
        block
        for block in BLOCKS
        if block.language in ("", "sh", "bash", "console")
        and not block.text.lstrip().startswith(NO_COMMAND)
        and first_line(block.text) not in CANNOT_RUN
        and first_line(block.text) != PIPELINE
        and not is_minute(block)
    ]


def is_minute(block: Block) -> bool:
    return block.document == "README.md" and block.text.startswith("sdstore=")


def talking_to(url: str, text: str) -> str:
    """The commands with the node at `url` in place of the default one; a --node of their own wins."""
    verbs = "publish|get|hint|channels|gaps|tail|backfill|sync|wait|interests (?:list|set|reset)"
    return re.sub(rf"(sdstore (?:{verbs}))\b", rf"\1 --node {url}", text)


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in listeners]
    for each in listeners:
        each.close()
    return ports


def clean_environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "no_proxy": "*",
    }


@contextmanager
def checkout(folder: Path) -> Iterator[Path]:
    """A clean folder in which `.venv/bin/sdstore` is what `make run` would have installed."""
    (folder / ".venv").symlink_to(BIN.parent)
    yield folder


def pasted(text: str, folder: Path) -> str:
    """The terminal's output when `text` is pasted into an interactive bash in `folder`."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        env=clean_environment(folder),
        start_new_session=True,
    ) as shell:
        os.close(terminal)
        # The prompt's own exit status is said by the trap, for each command that fails.
        whole = f"PS1='$ '; trap 'echo FAILED: $BASH_COMMAND' ERR\n{text}\nkill $(jobs -p) 2>/dev/null || true; wait; exit\n"
        shown = b""
        waiting = whole.encode()
        deadline = time.monotonic() + PASTE_S_MAX
        while time.monotonic() < deadline:
            readable, writable, _ = select.select(
                [controller], [controller] if waiting else [], [], 1
            )
            try:
                if readable:
                    if not (read := os.read(controller, 65_536)):
                        break
                    shown += read
            except OSError:  # the shell has ended
                break
            if writable:
                waiting = waiting[os.write(controller, waiting[:512]) :]
        else:
            shell.kill()
            pytest.fail(f"the shell did not end: {shown.decode(errors='replace')}")
    os.close(controller)
    return shown.decode(errors="replace")


def test_the_minute_of_the_readme_works_when_it_is_pasted_as_a_whole(tmp_path: Path) -> None:
    [minute] = [block for block in BLOCKS if is_minute(block)]
    assert "curl" in minute.text
    first, second = free_ports(2)
    text = minute.text.replace("8000", str(first)).replace("8001", str(second))
    text = talking_to(f"http://127.0.0.1:{first}", text)
    with checkout(tmp_path) as folder:
        serving = subprocess.Popen(
            [".venv/bin/sdstore", "serve", "--port", str(first)],
            cwd=folder,
            env=clean_environment(folder),
            stdout=subprocess.DEVNULL,
        )
        try:
            shown = pasted(text, folder)
        finally:
            serving.terminate()
            serving.wait(30)
    assert "FAILED: " not in shown.replace("echo FAILED: ", ""), shown
    assert "error" not in shown.lower(), shown
    assert len(re.findall(r"message ID\s+m1", shown)) == 2, shown
    assert "in sync" in shown, shown


def test_every_block_of_a_document_is_run_by_some_test_or_named_with_a_reason() -> None:
    languages = {block.language for block in BLOCKS} - {"mermaid"}  # drawings
    assert languages <= {"", "sh", "bash", "console", "python", "toml", "json", "text"} | CONFIGS
    assert set(CANNOT_RUN) <= {first_line(block.text) for block in BLOCKS}, "remove what is gone"
    assert len(shell_blocks()) >= 1


CONFIGS = {"nginx", "caddy", "caddyfile", "yaml", "ini"}
"""Languages of other programs' settings, which the tests of their pages run."""


@pytest.mark.parametrize(
    "block", shell_blocks(), ids=lambda block: f"{block.document}:{first_line(block.text)[:40]}"
)
def test_a_block_of_commands_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    """In a folder with a store in `data`, the node that serves it, and a file of messages."""
    messages = b"".join(delimited(encode(message(number))) for number in range(20))
    (tmp_path / "messages.ldp").write_bytes(messages)
    with checkout(tmp_path) as folder, running_node(folder / "data") as url:
        assert cli("publish", folder / "messages.ldp", "--node", url).code == 0
        text = re.sub(r"\bID\b", "m3", block.text)
        text = talking_to(url, text)
        text = text.replace(README_NODE, url).replace("localhost:8000", url.removeprefix("http://"))
        run_in_bash(text, folder)


def run_in_bash(text: str, folder: Path) -> None:
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=clean_environment(folder),
        capture_output=True,
        text=True,
        timeout=PASTE_S_MAX * 5,
        check=False,
    )
    assert ran.returncode == 0, f"{text}\n{ran.stdout}{ran.stderr}"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_spark")
def test_the_verbs_of_the_pipeline_s_page_run_one_after_the_other(tmp_path: Path) -> None:
    [block] = [each for each in BLOCKS if first_line(each.text) == PIPELINE]
    messages = b"".join(delimited(encode(message(number, "general"))) for number in range(200))
    (tmp_path / "messages.ldp").write_bytes(messages)
    with checkout(tmp_path) as folder, running_node(folder / "data") as url:
        assert cli("publish", folder / "messages.ldp", "--node", url).code == 0
        run_in_bash(block.text.replace(README_NODE, url), folder)


@pytest.mark.parametrize(
    "block",
    # tests/test_python_page.py runs the blocks of ordering.md, python.md and README.md one after the
    # other, and tests/sds/test_participant_page.py those of participant.md.
    [
        b
        for b in BLOCKS
        if b.language == "python"
        and b.document not in {"ordering.md", "participant.md", "python.md", "README.md"}
    ],
    ids=lambda block: f"{block.document}:{first_line(block.text)}",
)
def test_a_block_of_python_runs(block: Block, tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as url:
        frame = encode(message(1, "/garden/1/bees/proto"))
        assert cli("publish", "-", "--format", "frame", "--node", url, stdin=frame).code == 0
        lamports = np.arange(100, dtype=np.int64)
        digests = np.random.default_rng(1).integers(0, 256, (100, 32), np.uint8)
        other = Records.from_lamports(lamports[:90], digests[:90])
        names = {
            "lamports": lamports,
            "digests": digests,
            "message": Negentropy(other, frame_limit_bytes=60_000).initiate(),
            "send": lambda asked: Negentropy(other, frame_limit_bytes=60_000).respond(asked),
        }
        text = block.text.replace(README_NODE, url)
        exec(compile(text, block.document, "exec"), names)


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "toml"],
    ids=lambda block: f"{block.document}:{first_line(block.text)}",
)
def test_a_block_of_settings_is_taken(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(block.text)
    settings, origin = load_settings(file, environment={})
    assert tomllib.loads(block.text).keys() <= settings.model_dump().keys()
    assert {name for name, where in origin.items() if where != "default"}


def inline(beginning: str) -> list[tuple[str, str]]:
    """(document, command) of the commands between backticks that begin with a word."""
    return [
        (document.name, found[1])
        for document in DOCUMENTS
        for found in re.finditer(
            rf"`({beginning} [^`\n]+)`",
            document.read_text(encoding="utf-8"),
        )
    ]


def verb_of(words: Sequence[str]) -> list[str]:
    """The verb, and what is below it: `snapshot export`."""
    group = "--help" not in words and words[1] in (
        "snapshot",
        "peers",
        "token",
        "interests",
        "quarantine",
    )
    return list(words[1 : 3 if group and len(words) > 2 else 2])


@pytest.mark.parametrize(("document", "command"), inline("sdstore"))
def test_a_command_in_a_sentence_has_a_verb_and_options_that_exist(
    document: str, command: str
) -> None:
    words = command.split()
    if words[1].startswith("-"):
        # Not run: one of them changes the shell's start-up files.
        assert words[1] in cli("--help").out, f"{document}: {command}"
        return
    if re.search(r" v\d+\b", command):
        return  # contexts of hashes: `sdstore recon v3 session key`
    below = verb_of(words)
    for verb in [[below[0], each] for each in below[1].split("\\|")] if len(below) > 1 else [below]:
        told = cli(*verb, "--help")
        assert told.code == 0, f"{document}: {command}"
        for option in re.findall(r"(--[a-z-]+)", command):
            assert option in told.out, f"{document}: {command}"
    assert words[1] in {*MODULES, "snapshot"}


MAKE_LINES = [
    (block.document, found[0].strip())
    for block in BLOCKS
    for found in re.finditer(r"^make [\w-]+", block.text, re.MULTILINE)
]


@pytest.mark.parametrize(("document", "command"), [*inline("make"), *MAKE_LINES])
def test_a_target_in_a_sentence_exists(document: str, command: str) -> None:
    planned = subprocess.run(
        ["make", "-n", *command.split()[1:2]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, f"{document}: {command}: {planned.stderr}"


@pytest.mark.parametrize(("document", "command"), inline("python -m"))
def test_a_module_in_a_sentence_exists(document: str, command: str) -> None:
    name = command.split()[2]
    assert find_spec(name) is not None, f"{document}: {command}"
