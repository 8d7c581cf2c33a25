"""A shopping list for several people. Type what to buy; Ctrl-D or Ctrl-C ends."""

import asyncio
import sys

from sdstore.participant import (
    Deliver,
    Message,
    ParticipantChannel,
    ParticipantDriver,
    ParticipantFile,
    SdstoreError,
    Status,
)

shown: set[str] = set()


def show(message: Message) -> None:
    if message.message_id not in shown:  # what was not confirmed is delivered again
        shown.add(message.message_id)
        print(f"{message.sender_id}: {message.content.decode(errors='replace')}", flush=True)


async def show_events(channel: ParticipantChannel) -> None:
    async for event in channel.events():
        if isinstance(event, Deliver):
            show(event.message)
            await channel.confirm(event.number)
        elif isinstance(event, Status):
            print(f"-- {event}", file=sys.stderr)


async def send_lines(channel: ParticipantChannel) -> None:
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async for line in lines:
        if text := line.strip():
            show(channel.message(await channel.send(text)))


async def main(name: str, stores: list[str]) -> None:
    with ParticipantFile(f"{name}.db") as file:
        async with ParticipantDriver(stores, file) as driver:
            channel = await driver.join("shopping", name)
            for message in channel.newest(20):
                show(message)
            showing = asyncio.create_task(show_events(channel))
            await send_lines(channel)
        await showing


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2:] or ["http://127.0.0.1:8000"]))
    except (SdstoreError, KeyboardInterrupt) as error:
        sys.exit(str(error))
