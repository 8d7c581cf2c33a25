"""Talking to a running node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.cli.exits import CliError, Exit
from app.errors import Code
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options
from sdstore.client.retry import Retry

# A person waits: one more try for a node that is just starting, no minutes of silence.
PATIENCE = Options(retry=Retry(attempts_max=2))


@contextmanager
def node_client(url: str) -> Iterator[StoreClient]:
    """A client of the node at `url`; says which node it is that cannot be reached."""
    with StoreClient(url, options=PATIENCE) as client:
        try:
            yield client
        except StoreError as error:
            if error.status:
                raise
            raise CliError(
                Exit.PEER_FAULT if error.code == "reply_too_large" else Exit.LOCAL_FAULT,
                error.code,
                f"{url}: {error.detail}",
            ) from None


def is_known(client: StoreClient, channel_id: str) -> bool:
    """Whether the node has messages of a channel; True also where it does not say."""
    try:
        client.channel(channel_id)
    except StoreError as error:
        return error.code != Code.NOT_FOUND
    return True
