"""The README's minute with the generated client: publish, read by ID, look up by hint, page."""

import json
import sys

from client import AuthenticatedClient
from client.api.channels import list_messages
from client.api.messages import get_hint, get_message, publish_one
from client.models import (
    MessageJson,
    MessagePage,
    ProblemJson,
    PublishedMessage,
    PublishOutcome,
    StoredMessage,
)
from client.types import UNSET, Unset

CHANNEL = "/garden/1/bees/proto"


def minute(store: AuthenticatedClient) -> list[str]:
    """What the calls found."""
    for number in (1, 2):
        message = MessageJson(
            message_id=f"m {number}",
            channel_id=CHANNEL,
            sender_id="ada",
            lamport_timestamp=str(number),
            content="YnV6eg==",
        )
        outcome = publish_one.sync(
            client=store, body=PublishedMessage(message), retrieval_hint="aa01,bb02"
        )
        assert isinstance(outcome, PublishOutcome), outcome
        assert outcome.outcome.value == "stored"

    one = get_message.sync("m 1", client=store)
    assert isinstance(one, StoredMessage), one
    found = [one.message.content or ""]

    hinted = get_hint.sync("bb02", client=store)
    assert not isinstance(hinted, ProblemJson)
    assert hinted is not None
    found.append(f"{len(hinted.messages)} hinted")

    after: str | Unset | None = UNSET
    while after is not None:
        page = list_messages.sync(CHANNEL, client=store, limit=1, after=after)
        assert isinstance(page, MessagePage), page
        found += [str(each.message.message_id) for each in page.messages]
        after = page.next_

    missing = get_message.sync("nope", client=store)
    assert isinstance(missing, ProblemJson), missing
    return [*found, str(missing.code)]


if __name__ == "__main__":
    print(json.dumps(minute(AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2]))))
