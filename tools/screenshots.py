"""Write the pictures of README.md anew: `python -m tools.screenshots [FOLDER]`, docs/pictures unless named.

Two nodes on loopback diverge and sync; a real Chromium looks at one of them. The range bar of README.md is an
example of a session on its way, drawn by the page itself.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import httpx
from playwright.sync_api import Page, sync_playwright

from app.access.operator import OPERATOR_FILE
from app.page.render import BAR_WIDTH, bar
from sdstore.client import StoreClient
from sdstore.sds.model import HistoryEntry, Message
from tests.support.server import running_node

ROOT = Path(__file__).parents[1]
CHANNEL = "/garden/1/bees/proto"
SEGMENTS = (
    *(("in_sync", 0.22), ("dont_have", 0.05), ("in_sync", 0.17), ("syncing", 0.09)),
    *(
        ("in_sync", 0.26),
        ("dont_have", 0.03),
        ("in_sync", 0.08),
        ("syncing", 0.04),
        ("in_sync", 0.06),
    ),
)
"""A session at 79 %."""


def messages(author: str, numbers: range) -> Iterator[Message]:
    """A garden's messages, each after the two before it."""
    chance, before = random.Random(author), []
    for number in numbers:
        text = chance.choice(
            ("the hive hums", "two frames of brood", "rain at noon", "clover blooms")
        )
        name = hashlib.sha256(f"{author}{number}".encode()).hexdigest()
        causes = tuple(HistoryEntry(each) for each in before[-2:])
        content = f'{{"text": "{text}", "hive": {number % 7}}}'.encode()
        yield Message(name, CHANNEL, author, 1_763_000_000_000 + number, causes, content=content)
        before.append(name)


@contextmanager
def browsed() -> Iterator[Page]:
    """A tab of Chromium."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        yield browser.new_page(viewport={"width": 1_100, "height": 720})
        browser.close()


def pictures(folder: Path) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch, browsed() as tab:
        here, there = Path(scratch, "here"), Path(scratch, "there")
        with running_node(here) as a, running_node(there) as b:
            shared = list(messages("cleo", range(6_000)))
            lacking = [
                each
                for author in ("bob", "dora", "eli", "fay")
                for numbers in (range(900, 1_500), range(3_000, 4_200), range(5_000, 5_300))
                for each in messages(author, numbers)
            ]
            for node, some in (
                (a, [*shared, *messages("ada", range(2_000, 2_400))]),
                (b, [*shared, *lacking]),
            ):
                with StoreClient(node.url) as store:
                    store.publish_batch(some)
            token = (here / OPERATOR_FILE).read_text(encoding="ascii").strip()
            as_operator = {"authorization": f"Bearer {token}"}
            tab.goto(f"{a.url}/page/sign-in")
            tab.fill("#token", token)
            tab.click("main button")
            httpx.post(f"{a.url}/v1/peers", json={"url": b.url}, headers=as_operator)
            tab.goto(f"{a.url}/page/peers")
            percent = tab.locator(".peer [data-percent]")
            while not 10 < float(percent.get_attribute("data-percent") or 0) < 95:
                tab.wait_for_timeout(20)
            tab.screenshot(path=folder / "peers.png")
            tab.goto(f"{a.url}/page/channel?channel_id={quote(CHANNEL, safe='')}&order=log")
            tab.locator("#rows a").nth(4).click()
            tab.screenshot(path=folder / "message.png")
    (folder / "range-bar.svg").write_text(range_bar(), encoding="utf-8")


def range_bar() -> str:
    """The range bar and its legend."""
    rectangles = bar([{"state": state, "share": share} for state, share in SEGMENTS])
    legend = "".join(
        f'<rect class="{state}" x="{x}" y="{56 - height}" width="36" height="{height}"/>'
        f'<text x="{x + 44}" y="56">{name}</text>'
        for state, name, x, height in (
            ("in_sync", "in sync", 0, 16),
            ("syncing", "syncing", 150, 11),
            ("dont_have", "don’t have", 300, 4),
        )
    )
    style = (
        "text{font:15px system-ui,sans-serif;fill:#55625f}.in_sync{fill:#0f6b64}.syncing{fill:#b7791f}"
        ".dont_have{fill:#7a8784}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {BAR_WIDTH} 64" role="img" '
        f'aria-label="A range bar: most of the interest is in sync"><style>{style}</style>{rectangles}{legend}</svg>\n'
    )


if __name__ == "__main__":
    pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/pictures")
