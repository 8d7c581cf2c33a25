"""The page in a real Chromium: a sync to watch, a walk through causes, hostile messages, the keyboard."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from app.access.callers import Scope
from app.access.operator import OPERATOR_FILE
from app.access.tokens import TokenFile
from sdstore.client import StoreClient
from sdstore.sds.model import HistoryEntry, Message
from tests.support.debian import program
from tests.support.server import RunningNode, running_node

CHANNEL = "/garden/1/bees/proto"
OF_CHANNEL = quote(CHANNEL, safe="")
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Of Debian: what Playwright would download is another build.
    path = program("chromium")
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        with playwright.chromium.launch(executable_path=path, args=sandbox) as browser:
            yield browser


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")


@pytest.fixture(scope="module")
def nodes(folders: tuple[Path, Path]) -> Iterator[tuple[RunningNode, RunningNode]]:
    with running_node(folders[0]) as a, running_node(folders[1]) as b:
        yield a, b


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(reduced_motion="reduce") as context:
        context.set_default_timeout(WAIT_MS)
        yield context


@pytest.fixture
def tab(context: BrowserContext) -> Page:
    return new_tab(context)


def new_tab(context: BrowserContext) -> Page:
    """A tab whose page must run nothing that it did not bring, and break no policy."""
    tab = context.new_page()
    tab.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    tab.on("pageerror", lambda error: pytest.fail(str(error)))
    return tab


def operator_of(folder: Path) -> str:
    return (folder / OPERATOR_FILE).read_text().strip()


def sign_in(tab: Page, node: RunningNode, token: str) -> None:
    tab.goto(f"{node.url}/page/sign-in")
    tab.get_by_label("Access token").fill(token)
    tab.get_by_role("button", name="Sign in").click()
    expect(tab.get_by_role("button", name="Sign out")).to_be_visible()


def publish(node: RunningNode, messages: Sequence[Message]) -> None:
    with StoreClient(node.url) as store:
        assert {each.outcome for each in store.publish_batch(messages)} <= {"stored", "duplicate"}


def some(author: str, count: int, size_bytes: int = 20) -> list[Message]:
    return [
        Message(f"{author}-{each}", CHANNEL, author, each + 1, content=b"x" * size_bytes)
        for each in range(count)
    ]


def violations(tab: Page) -> list[str]:
    found = Axe().run(tab).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found]


def test_two_nodes_diverge_and_the_bar_moves_until_both_are_equal(
    nodes: tuple[RunningNode, RunningNode], folders: tuple[Path, Path], tab: Page
) -> None:
    a, b = nodes
    publish(a, some("ada", 1_500))
    publish(b, some("bob", 6_000, 400))
    sign_in(tab, a, operator_of(folders[0]))
    tab.get_by_role("link", name="Peers", exact=True).click()
    tab.get_by_label("URL").fill(b.url)
    # What the bar shows, as the browser shows it.
    tab.context.add_init_script(
        """new MutationObserver(() => {
             const shown = document.querySelector(".peer [data-percent]")?.dataset.percent;
             const seen = JSON.parse(sessionStorage.seen ?? "[]");
             if (shown && shown !== seen.at(-1)) sessionStorage.seen = JSON.stringify([...seen, shown]);
           }).observe(document, {childList: true, subtree: true});"""
    )
    tab.get_by_role("button", name="Add").click()
    card = tab.locator(".peer")
    expect(card.get_by_text("✓ in sync")).to_be_visible(timeout=WAIT_MS)
    expect(card.get_by_text("100.0")).to_be_visible()
    seen = [float(each) for each in tab.evaluate("JSON.parse(sessionStorage.seen)")]
    # Sessions that find nothing new can follow, each from 0 to 100.
    assert any(0 < each < 100 for each in seen)
    assert seen[-1] == 100
    roots = {
        node.http.get("/v1/channels", params={"channel_id": CHANNEL}).json()["root"]
        for node in nodes
    }
    assert len(roots) == 1
    expect(card.get_by_text(re.compile("Missing here"))).to_be_visible()
    tab.get_by_role("button", name="Sync now with").click()
    expect(card.get_by_text("✓ in sync")).to_be_visible()
    tab.get_by_role("button", name="Remove").click()
    expect(tab.get_by_text("syncs with nobody")).to_be_visible()


def test_a_message_is_found_by_id_and_by_hint_and_its_causes_are_walked(
    nodes: tuple[RunningNode, RunningNode], tab: Page
) -> None:
    a, _ = nodes
    chain = [
        Message(
            f"walk-{n}",
            "walk",
            "ada",
            n,
            (HistoryEntry(f"walk-{n - 1}"),) if n > 1 else (),
            content=b"{}",
        )
        for n in range(1, 4)
    ]
    publish(a, chain)
    body = {
        "message": {
            "message_id": "hinted",
            "channel_id": "walk",
            "lamport_timestamp": "9",
            "content": "aGk=",
        }
    }
    a.http.post("/v1/messages", json=body, headers={"retrieval-hint": "ab12cd"}).raise_for_status()
    tab.goto(a.url)
    find = tab.get_by_label("Find a message")
    find.fill("walk-3")
    find.press("Enter")
    expect(tab.get_by_role("heading", level=1)).to_have_text("walk-3")
    for cause in ("walk-2", "walk-1"):
        tab.get_by_role("link", name=cause).click()
        expect(tab.get_by_role("heading", level=1)).to_have_text(cause)
    tab.locator(".graph").get_by_role("link", name="walk-2").click()  # back: named by
    expect(tab.get_by_role("heading", level=1)).to_have_text("walk-2")
    tab.get_by_label("Find a message").fill("ab12cd")
    tab.get_by_role("button", name="Find").click()
    tab.get_by_role("link", name="hinted").click()
    expect(tab.locator("pre.content")).to_have_text("hi")
    tab.get_by_role("link", name="hex").click()
    expect(tab.locator("pre.content")).to_have_text("00000000  68 69")


def test_a_hostile_message_is_shown_and_does_nothing(
    nodes: tuple[RunningNode, RunningNode], folders: tuple[Path, Path], tab: Page
) -> None:
    a, _ = nodes
    script = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp.exe\x1b[2J"
    hostile = Message(
        script, f"h{script}", f'"><svg onload=alert(3)>{script}', 1,
        (HistoryEntry(f"javascript:alert(4)//{script}"),), content=script.encode() * 10_000,
    )  # fmt: skip
    publish(a, [hostile])
    sign_in(tab, a, operator_of(folders[0]))
    channel = quote(hostile.channel_id, safe="")
    for path in ("channels", f"channel?channel_id={channel}", f"gaps?channel_id={channel}"):
        tab.goto(f"{a.url}/page/{path}")
        expect(tab.locator("main .code", has_text="U+202E").first).to_be_visible()
    tab.goto(f"{a.url}/page/channel?channel_id={channel}")
    tab.locator("#rows a").first.click()
    for form in ("text", "hex"):
        tab.get_by_role("link", name=form).click()
        assert tab.locator("main script, main img, main svg[onload]").count() == 0
        text = tab.locator("main").inner_text()
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert len(tab.content()) < 150_000
    assert tab.locator("a[href^='javascript:']").count() == 0
    expect(tab.locator(".graph")).to_contain_text("javascript:alert(4)")


def test_a_readers_token_shows_no_operators_part(
    nodes: tuple[RunningNode, RunningNode], folders: tuple[Path, Path], tab: Page
) -> None:
    a, _ = nodes
    publish(a, some("ada", 1))
    _, token = TokenFile(folders[0] / "tokens.json").create(scopes=[Scope.READ])
    sign_in(tab, a, token)
    for path in ("/", "/page/channels", f"/page/message?message_id=ada-0&channel_id={OF_CHANNEL}"):
        tab.goto(a.url + path)
        expect(tab.get_by_role("link", name="Channels", exact=True)).to_be_visible()
        for name in ("Peers", "Quarantine"):
            expect(tab.get_by_role("link", name=name)).to_have_count(0)
        expect(tab.get_by_text("Retire this message")).to_have_count(0)
    answer = tab.goto(f"{a.url}/page/peers")
    assert answer is not None
    assert answer.status == 403


def test_two_nodes_of_one_host_have_two_sign_ins(
    nodes: tuple[RunningNode, RunningNode], folders: tuple[Path, Path], tab: Page
) -> None:
    for node, folder in zip(nodes, folders, strict=True):
        sign_in(tab, node, operator_of(folder))
    for node in nodes:
        answer = tab.goto(f"{node.url}/page/peers")
        assert answer is not None
        assert answer.status == 200
    tab.get_by_role("button", name="Sign out").click()
    expect(tab.get_by_role("link", name="Sign in")).to_be_visible()
    tab.goto(nodes[0].url)
    expect(tab.get_by_role("button", name="Sign out")).to_be_visible()


def test_the_keyboard_alone_goes_everywhere(
    nodes: tuple[RunningNode, RunningNode], folders: tuple[Path, Path], tab: Page
) -> None:
    a, _ = nodes
    publish(a, [Message("key", "keys", "ada", 1, content=b"x")])

    def go_to(name: str) -> None:
        """Tab to what has that name or text, and press Enter."""
        for _ in range(80):
            tab.keyboard.press("Tab")
            said = tab.evaluate(
                "document.activeElement.ariaLabel ?? (document.activeElement.id || document.activeElement.textContent)"
            )
            if said.strip().startswith(name):
                return
        pytest.fail(f"{name} cannot be reached")

    tab.goto(a.url)
    go_to("Skip to content")
    go_to("Sign in")
    tab.keyboard.press("Enter")
    expect(tab.get_by_label("Access token")).to_be_focused()
    tab.keyboard.type(operator_of(folders[0]))
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("button", name="Sign out")).to_be_visible()
    for link in ("Channels", "keys", "key", "hex"):
        go_to(link)
        with tab.expect_navigation():
            tab.keyboard.press("Enter")
    go_to("Retire this message")
    tab.keyboard.press("Enter")
    expect(tab.get_by_label("Reason")).to_be_visible()
    go_to("Peers")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", level=1)).to_have_text("Peers")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(
    nodes: tuple[RunningNode, RunningNode],
    folders: tuple[Path, Path],
    browser: Browser,
    scheme: str,
) -> None:
    a, b = nodes
    publish(
        a,
        [
            *some("ada", 1),
            Message("axe", CHANNEL, "ada", 9, (HistoryEntry("gone"),), content=b"\x00\xff"),
        ],
    )
    a.http.post("/v1/peers", json={"url": b.url}).raise_for_status()
    paths = (
        "/", "/page/peers", "/page/channels", f"/page/channel?channel_id={OF_CHANNEL}", "/page/quarantine",
        f"/page/gaps?channel_id={OF_CHANNEL}", f"/page/order?channel_id={OF_CHANNEL}&indexers=ada%0Aeve",
        f"/page/message?message_id=axe&channel_id={OF_CHANNEL}", "/page/find?q=nothing", "/page/sign-in",
    )  # fmt: skip
    with browser.new_context(
        color_scheme=scheme, viewport={"width": 390, "height": 844}
    ) as context:  # type: ignore[arg-type]
        tab = new_tab(context)
        sign_in(tab, a, operator_of(folders[0]))
        for path in paths:
            tab.goto(a.url + path)
            assert violations(tab) == [], path
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_new_messages_appear_and_a_hidden_tab_has_no_stream(
    nodes: tuple[RunningNode, RunningNode], tab: Page
) -> None:
    a, _ = nodes

    def readers() -> int:
        text = a.http.get("/metrics").text
        return int(float(re.findall(r"^sdstore_live_readers (\S+)", text, re.MULTILINE)[0]))

    def until(count: int) -> None:
        for _ in range(400):
            if readers() == count:
                return
            tab.wait_for_timeout(25)
        pytest.fail(f"{readers()} streams, not {count}")

    until(0)
    tab.goto(f"{a.url}/page/channel?channel_id=tail")
    expect(tab.get_by_text("● live")).to_be_visible()
    until(1)
    publish(a, [Message("new-<b>", "tail", "ada", 1, content=b"one")])
    expect(tab.get_by_role("link", name="new-<b>")).to_be_visible()
    # Chromium without a screen never hides a tab by itself.
    hide = """state => {
      Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    tab.evaluate(hide, "hidden")
    until(0)
    publish(a, [Message("missed", "tail", "ada", 2, content=b"two")])
    tab.evaluate(hide, "visible")
    until(1)
    expect(tab.get_by_role("link", name="missed")).to_be_visible()


def test_eight_tabs_work_over_http_1(
    nodes: tuple[RunningNode, RunningNode], context: BrowserContext
) -> None:
    a, _ = nodes
    tabs = []
    for number in range(8):
        tab = new_tab(context)
        tab.goto(f"{a.url}/page/channel?channel_id=tabs")
        tab.evaluate(
            """() => {
              Object.defineProperty(document, "visibilityState", {value: "hidden", configurable: true});
              document.dispatchEvent(new Event("visibilitychange"));
            }"""
        ) if number < 7 else None
        tabs.append(tab)
    for tab in tabs:
        tab.get_by_role("link", name="Channels", exact=True).click()
        expect(tab.get_by_role("heading", level=1)).to_have_text("Channels")
