"""The operator's policy sees each message once at the one door, and the quarantine keeps what it holds."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from app.access.callers import Caller
from app.errors import Problem, SettingsError
from app.ingest.policy import (
    ACCEPT,
    GROUP,
    Action,
    Candidate,
    Verdict,
    Way,
    load_policy,
    quarantine,
    refuse,
)
from app.ingest.prepare import NewEntry, Publication, prepare
from app.ingest.quarantine import Quarantine
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from recon.agreement import Interest
from sdstore import mvds
from sdstore.sds import SHA256_MESSAGE
from sdstore.sds.codec import encode
from sdstore.sds.model import Message, entry_digest
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire import recon_pb2 as wire
from tests.support.cli import cli
from tests.support.federation import (
    InProcessPeer,
    Remembered,
    holdings,
    local_of,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)
from tests.support.server import AS_OPERATOR, PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores

HERE = "tests.app.test_policy"
PATIENT = replace(DEFAULT_LIMITS, policy_call_s_max=30)  # on a busy machine
NONSENSE: Any = {
    b"an unknown action": Verdict("postpone", "spam"),  # type: ignore[arg-type]
    b"line breaks": Verdict(Action.REFUSE, "spam\r\nlocation: x"),
    b"no code": Verdict(Action.REFUSE),
    b"no text": Verdict(Action.REFUSE, "spam", b"bytes"),  # type: ignore[arg-type]
    b"nonsense": "accept",
}


class Words:
    """Judges by the content; writes down what it saw."""

    revision: ClassVar[str] = "1"
    seen: ClassVar[list[tuple[bytes, Way]]] = []
    hang: ClassVar[threading.Event] = threading.Event()

    def __call__(self, candidate: Candidate) -> Verdict:
        content = candidate.message.content or b""
        self.seen.append((content, candidate.way))
        if content.endswith(b"at length"):
            action = Action.REFUSE if content.startswith(b"bad") else Action.QUARANTINE
            return Verdict(action, "code", "x" * 5_000)
        if content.startswith(b"bad"):
            return refuse("spam", "it is bad")
        if content.startswith(b"odd"):
            return quarantine("it is odd")
        if content.startswith(b"raise"):
            raise RuntimeError("SECRET of the policy")
        if content in NONSENSE:
            return NONSENSE[content]  # type: ignore[no-any-return]
        if content.startswith(b"hang"):
            self.hang.wait(20)
        return ACCEPT


class Milder(Words):
    revision = "2"

    def __call__(self, candidate: Candidate) -> Verdict:
        self.seen.append((candidate.message.content or b"", candidate.way))
        return ACCEPT


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    Words.seen.clear()
    Words.hang.clear()
    yield
    Words.hang.set()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path, PATIENT, policy=f"{HERE}:Words") as node:
        yield node


def of(content: bytes, number: int = 0, channel_id: str = "c") -> Message:
    message_id = f"{content[:20].decode()} {number}"
    return Message(message_id, channel_id, lamport_timestamp=number, content=content)


def held(node: RunningNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.http.get("/v1/quarantine").json()["messages"]
    return found


def test_a_publication_is_accepted_refused_with_a_code_or_held(node: RunningNode) -> None:
    assert node.publish(of(b"good")).status_code == 201
    refused = node.publish(of(b"bad"))
    assert (refused.status_code, refused.json()["code"]) == (403, "policy_refused")
    assert (refused.json()["policy_code"], refused.json()["detail"]) == ("spam", "it is bad")
    odd = node.publish(of(b"odd"))
    assert (odd.status_code, odd.json()["code"]) == (403, "quarantined")
    ids = [each["message"]["message_id"] for each in node.http.get("/v1/feed").json()["messages"]]
    assert ids == ["good 0"]
    assert Words.seen == [(b"good", Way.HTTP), (b"bad", Way.HTTP), (b"odd", Way.HTTP)]
    text = node.http.get("/metrics").text
    for verdict in ("accepted", "refused", "quarantined"):
        assert f'sdstore_policy_verdicts_total{{verdict="{verdict}"}} 1.0' in text


def test_each_way_in_is_named_and_each_message_is_judged_once(tmp_path: Path) -> None:
    async def check() -> None:
        with_policy = {"policy": f"{HERE}:Words"}
        async with open_nodes(tmp_path, with_policy, {}, limits=PATIENT) as (one, two):
            door = one.ingest.door
            await door.publish_many([Publication(encode(of(b"good", n))) for n in range(250)])
            assert Words.seen == [(b"good", Way.BATCH)] * 250
            Words.seen.clear()
            frame = encode(of(b"good", 1_000))
            payload = mvds.encode(mvds.Payload(messages=(mvds.Message(b"c", 9, frame),)))
            from app.mvds import MvdsCall  # noqa: PLC0415

            await one.mvds.exchange(
                MvdsCall(
                    caller=Caller("caller"),
                    peer_id="peer",
                    channel_ids=("c",),
                    payload=payload,
                    interactive=False,
                )
            )
            assert Words.seen == [(b"good", Way.MVDS)]
            Words.seen.clear()
            frames = [
                encode(Message(f"r{n}", "c", sender_id="s", content=b"%s" % content))
                for n, content in enumerate((b"relayed", b"odd"))
            ]
            outcomes = await one.live.relay.take(frames, "other")
            assert [isinstance(each, Problem) for each in outcomes] == [False, True]
            await one.live.relay.take(frames[:1], "another")
            assert Words.seen == [(b"relayed", Way.RELAY), (b"odd", Way.RELAY)]
            assert one.ingest.quarantine.page(0, 10) == []
            Words.seen.clear()
            await publish(two, [of(b"bad", 5), of(b"fetched", 6)])
            await sync(one, two, Remembered())
            assert sorted(Words.seen) == [(b"bad", Way.SYNC), (b"fetched", Way.SYNC)]
            Words.seen.clear()
            await publish(two, [of(b"pushed", 7)])
            await sync(two, one, Remembered())
            assert (b"pushed", Way.RECON) in Words.seen
            assert {way for _, way in Words.seen} == {Way.RECON}

    run(check())


def test_what_an_unauthorized_peer_pushes_is_not_judged_and_not_held(tmp_path: Path) -> None:
    from app.access.callers import Caller, Scope  # noqa: PLC0415
    from app.recon.endpoint import take_items  # noqa: PLC0415

    async def check() -> None:
        async with open_nodes(tmp_path, {"policy": f"{HERE}:Words"}, limits=PATIENT) as (one,):
            limited = Caller(
                "token", frozenset({Scope.PUBLISH}), Interest.make(channels=frozenset({"mine"}))
            )
            items = [
                wire.Item(entry=wire.Item.Entry(frame=encode(of(b"odd", channel_id=name))))
                for name in ("mine", "theirs")
            ]
            outcomes = await take_items(local_of(one), items, limited.covers)
            assert outcomes == [wire.PUSH_REFUSED] * 2
            assert [each.channel_id for each in one.ingest.quarantine.page(0, 10)] == ["mine"]

    run(check())


@pytest.mark.parametrize("content", [b"raise", *NONSENSE])
def test_a_policy_that_fails_refuses_the_message_and_is_logged_once(
    node: RunningNode, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "app.ingest.policy"):
        for number in range(3):
            failed = node.publish(of(content, number))
            assert (failed.status_code, failed.json()["code"]) == (503, "policy_failed")
            assert failed.headers["retry-after"]
            assert b"SECRET" not in failed.content
    assert len(caplog.records) == 1
    # The others of its batch are judged.
    lines = b"".join(
        b'{"message": {"message_id": "%s %d", "channel_id": "c", "lamport_timestamp": "1", '
        b'"content": "Z29vZA=="}}\n' % (content, n)
        for n in range(2)
    )
    batch = node.http.post(
        "/v1/messages/batch", content=lines, headers={"content-type": "application/x-ndjson"}
    )
    assert [each["outcome"] for each in batch.json()["outcomes"]] == ["stored", "stored"]
    assert node.publish(of(b"good")).status_code == 201


def test_a_slow_policy_refuses_in_bounded_time_and_at_once_while_it_hangs(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, policy_call_s_max=0.2)
    with running_node(tmp_path, limits, policy=f"{HERE}:Words") as node:
        started_s = time.monotonic()
        assert node.publish(of(b"hang")).json()["code"] == "policy_failed"
        assert time.monotonic() - started_s < 10
        for number in range(20):
            assert node.publish(of(b"good", number)).json()["code"] == "policy_failed"
        # Reads go on.
        assert node.http.get("/v1/channels").status_code == 200
        Words.hang.set()
        ends_s = time.monotonic() + 20
        while node.publish(of(b"good")).status_code != 201:
            assert time.monotonic() < ends_s
            time.sleep(0.02)


# --- the quarantine ---------------------------------------------------------------------------------


def test_a_released_message_is_stored_with_its_hints_and_not_judged_again(
    node: RunningNode,
) -> None:
    frame = encode(of(b"odd"))
    node.http.post("/v1/messages", content=frame, headers=PROTOBUF | {"retrieval-hint": "abcd"})
    digest = entry_digest(of(b"odd")).hex()
    (row,) = held(node)
    assert (row["digest"], row["way"], row["reason"]) == (digest, "http", "it is odd")
    shown = node.http.get(f"/v1/quarantine/{digest}").json()
    assert shown["message"]["message_id"] == "odd 0"
    # A second publication is held already, and costs no call of the policy.
    assert node.publish(of(b"odd")).json()["code"] == "quarantined"
    assert len(held(node)) == len(Words.seen) == 1
    released = node.http.post(f"/v1/quarantine/{digest}/release")
    assert released.json() == {"digest": digest, "outcome": "stored"}
    assert held(node) == []
    assert node.http.get("/v1/messages/odd%200").status_code == 200
    assert "odd 0" in node.http.get("/v1/hints/abcd").text
    assert len(Words.seen) == 1
    assert node.http.post(f"/v1/quarantine/{digest}/release").status_code == 404


def test_a_dropped_message_stays_refused_after_a_restart(tmp_path: Path) -> None:
    digest = entry_digest(of(b"odd")).hex()
    with running_node(tmp_path, PATIENT, policy=f"{HERE}:Words") as node:
        node.publish(of(b"odd"))
        assert node.http.delete(f"/v1/quarantine/{digest}").status_code == 204
        assert node.http.delete(f"/v1/quarantine/{digest}").status_code == 404
    with running_node(tmp_path, PATIENT, policy=f"{HERE}:Milder") as node:
        refused = node.publish(of(b"odd")).json()
        assert (refused["code"], refused["policy_code"]) == ("policy_refused", "dropped")


class Stricter(Words):
    """Holds whatever it sees."""

    revision = "3"

    def __call__(self, candidate: Candidate) -> Verdict:
        self.seen.append((candidate.message.content or b"", candidate.way))
        return quarantine("everything is odd")


def test_a_full_quarantine_refuses_and_displaces_nothing(tmp_path: Path) -> None:
    limits = replace(
        PATIENT,
        quarantine_items_max=3,
        quarantine_bytes_max=5_000,
        quarantine_dropped_max=2,
    )
    with running_node(tmp_path, limits, policy=f"{HERE}:Words") as node:
        assert node.publish(of(b"odd" + b"x" * 4_000)).json()["code"] == "quarantined"
        refused = node.publish(of(b"odd" + b"y" * 4_000)).json()
        assert (refused["code"], refused["policy_code"]) == ("policy_refused", "quarantine_full")
        codes = [node.publish(of(b"odd", n)).json()["code"] for n in range(3)]
        assert codes == ["quarantined", "quarantined", "policy_refused"]
        assert len(held(node)) == 3
        pages = node.http.get("/v1/quarantine?limit=2").json()
        rest = node.http.get(f"/v1/quarantine?limit=2&after={pages['next']}").json()
        assert [len(pages["messages"]), len(rest["messages"]), rest["next"]] == [2, 1, None]
        for each in held(node):
            node.http.delete(f"/v1/quarantine/{each['digest']}")
        # Two digests are remembered, and the oldest is judged again.
        assert node.publish(of(b"odd" + b"x" * 4_000)).json()["code"] == "quarantined"
        assert node.publish(of(b"odd", 1)).json()["policy_code"] == "dropped"


@pytest.mark.parametrize("content", [b"no database" * 100, b""])
def test_a_damaged_quarantine_refuses_and_reads_go_on(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "quarantine.db").write_bytes(content)
    with running_node(tmp_path, PATIENT, policy=f"{HERE}:Words") as node:
        published = node.publish(of(b"odd"))
        if content:
            assert published.json()["code"] == "policy_failed"
            assert node.http.get("/v1/quarantine").json()["code"] == "store_unavailable"
        else:
            assert published.json()["code"] == "quarantined"
        assert node.http.get("/v1/channels").status_code == 200


def test_a_flood_of_refused_messages_displaces_what_readers_are_told_of_its_own_sender_only(
    tmp_path: Path,
) -> None:
    """The share of one caller or peer. The bound for all leaves room for ten of them."""
    limits = replace(DEFAULT_LIMITS, quarantine_told_of_one_max=3, quarantine_told_max=30)
    file = Quarantine(tmp_path / "quarantine.db", limits)
    messages = [of(b"bad", number) for number in range(101)]
    honest, *flood = [replace(each, message_id=SHA256_MESSAGE.make(each)) for each in messages]

    def refuse_all(messages: list[Message], who: str) -> None:
        for each in messages:
            prepared = prepare(Publication(encode(each)), limits)
            assert isinstance(prepared, NewEntry)
            file.refuse([prepared], who)

    refuse_all([honest], "peer a")
    refuse_all(flood, "peer b")
    told = [each for each, *_ in file.absences([each.message_id for each in (honest, *flood)])]
    assert sorted(told) == sorted(each.message_id for each in (honest, *flood[-3:]))


@pytest.mark.parametrize("decisions", [("POST", "DELETE"), ("POST", "POST"), ("DELETE", "DELETE")])
def test_of_two_decisions_about_a_message_one_counts_and_the_other_is_told(
    stores: Stores, tmp_path: Path, decisions: tuple[str, str]
) -> None:
    url = stores.new_url()
    with (
        running_node(tmp_path, PATIENT, policy=f"{HERE}:Words", database_url=url) as node,
        ThreadPoolExecutor(2) as executor,
    ):

        def decide(method: str, path: str) -> int:
            with httpx.Client(base_url=node.url, auth=AS_OPERATOR, trust_env=False) as http:
                return http.request(method, path).status_code

        for number in range(15):
            node.publish(of(b"odd", number))
            path = f"/v1/quarantine/{entry_digest(of(b'odd', number)).hex()}"
            paths = [path + "/release" * (method == "POST") for method in decisions]
            first, second = executor.map(decide, decisions, paths)
            assert sorted((first // 100, second // 100)) == [2, 4]
            is_released = (first == 200) or (second == 200)
            assert node.http.get(f"/v1/messages/odd {number}").is_success is is_released
            assert held(node) == []


def test_the_verbs_list_release_and_drop(node: RunningNode) -> None:
    for number in range(2):
        node.publish(of(b"odd", number))
    first, second = (each["digest"] for each in held(node))
    listed = cli("quarantine", "list", "--node", node.url)
    assert "it is odd" in listed.out
    shown = next(each for each in listed.out.split() if first.startswith(each))
    for wrong, code in (("f" * 16, 1), (first[:15], 2), ("zz", 2)):
        assert cli("quarantine", "release", wrong, "--node", node.url).code == code
    assert cli("quarantine", "release", shown.upper(), "--node", node.url).code == 0
    assert cli("quarantine", "drop", second, "--node", node.url).code == 0
    assert cli("quarantine", "list", "--node", node.url, "--json").out == ""
    missing = cli("quarantine", "drop", second, "--node", node.url)
    assert (missing.code, "not_found" in missing.err) == (1, True)
    assert node.http.get("/v1/messages/odd%200").status_code == 200


# --- peers ------------------------------------------------------------------------------------------


def test_refusals_are_local_policy_and_a_new_revision_makes_both_sides_look_again(
    tmp_path: Path,
) -> None:
    good, bad, odd = of(b"good", 1), of(b"bad", 2), of(b"odd", 3)

    async def check() -> None:
        memory, other_memory = Remembered(), Remembered()
        async with open_nodes(tmp_path, {"policy": f"{HERE}:Words"}, {}, limits=PATIENT) as (
            one,
            two,
        ):
            await publish(two, [good, bad, odd])
            report = await sync(one, two, memory)
            assert (report.outcome, report.entries_received) == (SyncOutcome.IN_SYNC, 1), report
            assert codes(report) == {("here", "policy_refused"), ("here", "quarantined")}
            pushed = await sync(two, one, other_memory)
            assert pushed.outcome is SyncOutcome.IN_SYNC, pushed
            assert {by for by, _ in codes(pushed)} == {"there"}
            # Refused ones are not sent again.
            Words.seen.clear()
            await sync(one, two, memory)
            await sync(two, one, other_memory)
            assert Words.seen == []
        async with open_nodes(tmp_path, {"policy": f"{HERE}:Milder"}, {}, limits=PATIENT) as (
            one,
            two,
        ):
            pushed = await sync(two, one, other_memory)
            assert pushed.outcome is SyncOutcome.IN_SYNC, pushed
            # What is in the quarantine stays there.
            assert codes(pushed) == {("there", "refused")}
            assert len(await holdings(one)) == 2
            await one.ingest.door.release(one.ingest.quarantine.entry(entry_digest(odd)))
            one.ingest.quarantine.forget(entry_digest(odd))
            assert await holdings(one) == await holdings(two)
            assert not (await sync(two, one, other_memory)).set_aside

    run(check())


def test_a_released_message_is_not_held_again_by_a_sync_and_a_dropped_one_is_never_fetched(
    tmp_path: Path,
) -> None:
    """In sessions that either side starts, with its memory of before and without, over a restart."""
    messages = [of(b"odd", number) for number in range(3)]
    kept, dropped, waiting = (entry_digest(each) for each in messages)

    async def settle(one: Node, two: Node) -> None:
        for here, there in ((one, two), (two, one)):
            memory = Remembered()
            for _ in range(2):
                report = await sync(here, there, memory)
                assert report.outcome is SyncOutcome.IN_SYNC, report

    async def check() -> None:
        async with open_nodes(tmp_path, {"policy": f"{HERE}:Words"}, {}, limits=PATIENT) as (
            one,
            two,
        ):
            await publish(two, messages)
            await settle(one, two)
            assert sorted(held_by(one)) == sorted([kept, dropped, waiting])
            await one.ingest.door.release(one.ingest.quarantine.entry(kept))
            one.ingest.quarantine.forget(kept)
            one.ingest.quarantine.drop(dropped)
            await settle(one, two)
            assert held_by(one) == [waiting]
        for policy in ("Words", "Stricter"):
            named = {"policy": f"{HERE}:{policy}"}
            async with open_nodes(tmp_path, named, {}, limits=PATIENT) as (one, two):
                Words.seen.clear()
                await settle(one, two)
                # A peer whose memory is lost pushes everything again.
                replica = local_of(one)
                items = [wire.Item(entry=wire.Item.Entry(frame=encode(each))) for each in messages]
                prepared = await replica.prepare(items)
                stored = await replica.commit(prepared)
                assert [(each.outcome, each.code) for each in stored] == [
                    (wire.DUPLICATE, ""),
                    (wire.PUSH_REFUSED, "policy_refused"),
                    (wire.PUSH_REFUSED, "quarantined"),
                ]
                assert (held_by(one), Words.seen) == ([waiting], [])

    run(check())


def held_by(node: Node) -> list[bytes]:
    return [each.digest for each in node.ingest.quarantine.page(0, 100)]


async def sync(one: Node, two: Node, memory: Remembered) -> SyncReport:
    local = local_of(one).for_peer("peer", Way.SYNC)
    memory.value = memory.value.with_own_policy(local.policy)  # as `app.federation.peers` does
    return await sync_with_peer(
        local, InProcessPeer(two), one.federation.interests.current, memory=memory
    )


def codes(report: SyncReport) -> set[tuple[str, str]]:
    return {(each["lacked_by"], each["code"]) for each in report.set_aside}


class NoRevision:
    def __call__(self, _: Candidate) -> Verdict:
        return ACCEPT


class LongRevision(Words):
    revision = 257 * "x"


class Broken:
    def __init__(self) -> None:
        raise OSError("no rules")


# --- loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{HERE}:Nothing", "cannot be loaded"),
        ("no.such.module:Policy", "cannot be loaded"),
        ("no-such-entry-point", "0 entry points"),
        (f"{HERE}:Broken", "no rules"),
        (f"{HERE}:NoRevision", "no revision"),
        (f"{HERE}:LongRevision", "at most 256 characters"),
        (f"{HERE}:HERE", "not callable"),
        ("", "cannot be loaded"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_an_error_of_the_setting(name: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        load_policy(name)


def test_a_policy_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("words", f"{HERE}:Words", GROUP)
    monkeypatch.setattr("app.ingest.policy.entry_points", lambda **_: [point])
    assert isinstance(load_policy("words").rules, Words)


@pytest.mark.parametrize("code", ["", "Spam", "a b", "x" * 65, "1a"])
def test_a_code_is_short_and_plain(code: str) -> None:
    with pytest.raises(ValueError, match="is not 1 to 64 characters"):
        refuse(code)


def test_the_example_refuses_holds_and_slows_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    monkeypatch.delitem(sys.modules, "policy", raising=False)
    with running_node(tmp_path, PATIENT, policy="policy:Moderation") as node:
        assert node.publish(of(b"hello")).status_code == 201
        assert node.publish(of(b"x" * 20_000)).json()["policy_code"] == "too_long"
        assert node.publish(of(b"a casino")).json()["code"] == "quarantined"
        replies = [node.publish(of(b"fast", number)) for number in range(130)]
        assert {each.json().get("policy_code") for each in replies} == {None, "too_fast"}
