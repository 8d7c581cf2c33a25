"""Run by test_faults: publishes for ever, prints each digest once it is acknowledged."""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from app.ingest.prepare import Publication
from tests.support.ingest import Ingest, open_ingest
from tests.support.publications import content_frame


async def publish_for_ever(ingest: Ingest, round_number: int, publisher: int) -> None:
    for number in count():
        frame = content_frame(number, channel_id=f"{round_number}/{publisher}")
        outcome = await ingest.door.publish(Publication(frame, (b"hint",)))
        assert outcome.digest is not None
        sys.stdout.write(f"{outcome.digest.hex()}\n")
        sys.stdout.flush()


async def main(url: str, round_number: int) -> None:
    async with open_ingest(url) as ingest:
        await asyncio.gather(*(publish_for_ever(ingest, round_number, n) for n in range(8)))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
