"""docs/operations.md: its blocks run, its alerts name series that exist, its unit is one for systemd."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.demo import running_node
from app.cli.output import Exit
from tests.support.cli import cli, process
from tests.support.debian import program
from tests.test_documented_commands import PASTE_S_MAX, checkout, clean_environment, free_ports

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "docs" / "deploy"
RULES: dict[str, Any] = yaml.safe_load((EXAMPLES / "alerts.yml").read_text(encoding="utf-8"))
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INDENTED = re.findall(r"(?<=\n\n)((?:    .*\n)+)", PAGE)


def run(text: str, folder: Path) -> str:
    """The output of a script in a new folder; all that it started has ended."""
    ports = free_ports(3)
    for number, port in enumerate(ports):
        text = text.replace(str(8_000 + number), str(port))
    with (
        checkout(folder),
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=clean_environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell,
    ):
        try:
            shown, _ = shell.communicate(timeout=PASTE_S_MAX)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # nodes that a failed script left
    assert shell.returncode == 0, f"{text}\n{shown}"
    return shown


def test_the_page_has_the_blocks_that_are_run_here() -> None:
    """tests/packaging run the first block and the second indented one: installing, and containers."""
    assert [block.split()[0] for block in BLOCKS] == ["python3", "sdstore", "echo", "sdstore"]
    assert [block.split()[0] for block in INDENTED] == ["token=$(sdstore", "sdstore", "docker"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3], ids=["two nodes", "three nodes", "backup"])
def test_the_recipes_run_as_they_stand(number: int, tmp_path: Path) -> None:
    shown = run(BLOCKS[number], tmp_path)
    if number == 1:
        assert "in sync" in shown
    elif number == 2:
        assert re.search(r"^ +1 .* chat/lobby$", shown, re.MULTILINE)
        assert re.search(r"^ +2 .* game/chess$", shown, re.MULTILINE)
    else:
        assert "monday.db: sound" in shown


def test_the_token_of_the_page_is_made(tmp_path: Path) -> None:
    run(f'{INDENTED[0]}\ntest -n "$token"', tmp_path)


@pytest.mark.slow
def test_each_alert_is_about_series_that_a_node_has(tmp_path: Path) -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len(rules) == 9
    with running_node(tmp_path / "one") as one, running_node(tmp_path / "two") as two:
        assert cli("peers", "add", one, "--node", two).code == 0
        assert cli("sync", one, "--node", two).code == 0
        shown = subprocess.run(
            ["curl", "-sf", f"{two}/metrics"], capture_output=True, text=True, check=True
        )
    series = set(re.findall(r"^(?:# TYPE )?(sdstore_\w+)", shown.stdout, re.MULTILINE))
    for rule in rules:
        assert {"summary", "remedy"} <= rule["annotations"].keys()
        named = set(re.findall(r"\bsdstore_\w+", rule["expr"]))
        assert named or "up{" in rule["expr"]
        assert named <= series, named - series


@pytest.mark.slow
def test_prometheus_takes_the_alerts() -> None:
    promtool = program("promtool", package="prometheus")
    subprocess.run([promtool, "check", "rules", str(EXAMPLES / "alerts.yml")], check=True)


# Values per minute: of a node that is well for ten minutes, then not.
FAULTS = {
    "SdstoreAway": ("up", {"job": "sdstore"}, "1x10 0x20", 12),
    "SdstoreNotReady": ("sdstore_ready", {"reason": "database"}, "1x10 0x20", 12),
    "SdstoreDiskLow": ("sdstore_disk_low", {}, "0x10 1x20", 12),
    "SdstoreTaskFails": (
        "sdstore_task_failures_total",
        {"task": "leases"},
        "0x10 0+1x20",
        17,
    ),
    "SdstoreCertificateExpires": (
        "sdstore_certificate_not_after_seconds",
        {},
        f"{14 * 86_400 + 600}x40",
        12,
    ),
    "SdstoreTokenExpires": (
        "sdstore_token_not_after_seconds",
        {"token": "5d3a"},
        f"{3 * 86_400 + 600}x40",
        12,
    ),
    "SdstorePeerNeverEqual": ("sdstore_peer_state", {"peer": "http://b"}, "_x10 1x40", 26),
    "SdstorePeerNotEqual": (
        "sdstore_peer_last_proof_timestamp_seconds",
        {"peer": "http://b"},
        "0+60x10 600x40",
        30,
    ),
    "SdstoreDamage": ("sdstore_content_lost", {}, "0x10 1x20", 12),
}


def test_each_alert_has_a_fault_here() -> None:
    rules = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
    assert sorted(FAULTS) == sorted(rules)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_an_alert_fires_when_the_page_says_so_and_not_before(name: str, tmp_path: Path) -> None:
    [rule] = [each for group in RULES["groups"] for each in group["rules"] if each["alert"] == name]
    series, labels, values, fires_after_min = FAULTS[name]
    labels = {"instance": "a"} | labels
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    kept = {key: value for key, value in labels.items() if key != "kind"}
    said = dict(rule["annotations"])
    for key, value in labels.items():
        said = {
            each: text.replace(f"{{{{ $labels.{key} }}}}", value) for each, text in said.items()
        }
    alert = {"exp_labels": kept | rule["labels"], "exp_annotations": said}
    times = ((fires_after_min - 2, []), (fires_after_min + 1, [alert]))
    cases = {
        "rule_files": [str(EXAMPLES / "alerts.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": f"{series}{{{shown}}}", "values": values}],
                "alert_rule_test": [
                    {"eval_time": f"{at}m", "alertname": name, "exp_alerts": expected}
                    for at, expected in times
                ],
            }
        ],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases), encoding="utf-8")
    promtool = program("promtool", package="prometheus")
    ran = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "cases.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_systemd_does_not_retry_what_only_an_operator_can_mend(tmp_path: Path) -> None:
    unit = (EXAMPLES / "sdstore.service").read_text(encoding="utf-8")
    [line] = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE) or [""]
    (tmp_path / "node.toml").write_text("prot = 8000")
    wrong = process("serve", "--config", tmp_path / "node.toml", "--data-dir", tmp_path)
    exposed = process("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", tmp_path)
    assert [Exit(int(code)) for code in line.split()] == [wrong.code, exposed.code]
    assert [wrong.code, exposed.code] == [Exit.USAGE, Exit.REFUSED]


def test_the_unit_starts_the_program_where_the_page_installs_it() -> None:
    unit = (EXAMPLES / "sdstore.service").read_text(encoding="utf-8")
    [program] = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    assert f"/opt/sdstore/bin/sdstore {program}\n" in BLOCKS[0]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (EXAMPLES / "sdstore.service").read_text(encoding="utf-8")
    words = re.search(r"^ExecStart=(\S+) (.*)$", unit, re.MULTILINE)
    assert words is not None
    for option in re.findall(r"--[a-z-]+", words[2]):
        assert option in cli("serve", "--help").out
    here = tmp_path / "sdstore.service"
    # The program need not be installed where the test runs.
    here.write_text(unit.replace(words[1], "/bin/true"), encoding="utf-8")
    ran = subprocess.run(
        [analyze, "verify", "--man=no", str(here)], capture_output=True, text=True, check=False
    )
    ours = [line for line in ran.stderr.splitlines() if "sdstore.service" in line]
    assert (ran.returncode, ours) == (0, []), ran.stderr
