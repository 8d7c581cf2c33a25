"""Every example of docs/python.md, docs/ordering.md and the README's section on Python runs as printed."""

import re
from pathlib import Path
from typing import Any

import pytest

from sdstore.participant import channelorder
from tests.support.server import running_node

ROOT = Path(__file__).parent.parent
NODE = "http://127.0.0.1:8000"


def examples(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["docs/python.md", "docs/ordering.md", "README.md"])
def test_the_examples_run_one_after_the_other_and_print_what_they_say(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples(page)
    assert found
    names: dict[str, Any] = {"__name__": "example"}
    monkeypatch.chdir(tmp_path)  # examples write files
    monkeypatch.setattr(channelorder, "VOTE_SLOT_MS", 200)
    with running_node(tmp_path / "node") as node:
        for example in found:
            exec(compile(example.replace(NODE, node.url), page, "exec"), names)
            printed = capsys.readouterr().out
            for line in example.splitlines():
                said = re.search(r"print\(.*\)  # (\w+)$", line)
                assert said is None or said[1] in printed.split(), line
