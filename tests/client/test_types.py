"""The types that a program sees which uses the library: mypy reads it as strictly as it reads ours."""

from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[2]
RIGHT = """
from collections.abc import Iterator
from typing import assert_type

from sdstore.client import (
    AsyncStoreClient, LiveStream, ParticipantDriver, PublishOutcome, StoreClient, StoreError,
)
from sdstore.client.records import StoredMessage
from sdstore.participant import Deliver, ParticipantFile
from sdstore.sds.log import MemoryLog


def blocking(store: StoreClient) -> None:
    assert_type(store.publish(b"frame"), PublishOutcome)
    assert_type(store.publish_batch([b"frame"]), list[PublishOutcome])
    assert_type(store.messages("garden", order="log"), Iterator[StoredMessage])
    assert_type(store.live(), LiveStream)
    print(store.backfill("garden", MemoryLog(), print).entries_received)


async def asynchronous(store: AsyncStoreClient) -> None:
    assert_type(await store.publish(b"frame"), PublishOutcome)
    async with store.live("garden") as stream:
        async for each in stream:
            print(each.message.content.decode())


async def participant() -> None:
    with ParticipantFile("chat.db") as file:
        async with ParticipantDriver(["http://127.0.0.1:8000"], file) as driver:
            channel = await driver.join("garden", "ada")
            async for event in channel.events():
                if isinstance(event, Deliver):
                    await channel.confirm(event.number)
"""
WRONG = """
from sdstore.client import StoreClient

store = StoreClient("http://127.0.0.1:8000")
store.messages(5)
store.get()
store.publish("text")
store.messages("garden", order="newest")
store.publish(b"frame").result
"""


def test_a_program_that_uses_the_clients_passes_the_strictest_checks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RIGHT)
    found, _, status = api.run(
        ["--strict", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    )
    assert status == 0, found


def test_wrong_calls_of_the_blocking_client_are_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WRONG)
    found, _, _ = api.run(["--strict", "--config-file", str(ROOT / "pyproject.toml"), str(program)])
    lines = {int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line}
    assert lines == {5, 6, 7, 8, 9}, found
