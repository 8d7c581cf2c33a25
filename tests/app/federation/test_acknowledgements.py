"""A node as initiator, over HTTP, with a peer that acknowledges elements and does not keep them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.access.operator import token_for
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from tests.app.federation.test_over_http import finished
from tests.support.cli import cli
from tests.support.federation import message
from tests.support.lying_peer import (
    Drops,
    DropsEvery,
    Forgetful,
    drops_all,
    drops_claims,
    forgetful_peer,
    lying_peer,
)
from tests.support.server import running_node

LIES = [drops_all, drops_claims, DropsEvery(2), DropsEvery(3), DropsEvery(7)]
NAMES = ["all", "claims", "every second", "every third", "every seventh"]


def publish(client: StoreClient, first: int, last: int) -> None:
    """Messages with a hint each."""
    items = [
        PublishItem(encode(message(n)), retrieval_hints=(b"hint of %d" % n,))
        for n in range(first, last)
    ]
    list(client.publish_batch(items))


def missing(client: StoreClient, last: int) -> set[str | bytes]:
    """The messages and hints up to a number that the node lacks."""
    keys = [key for n in range(last) for key in (f"m{n}", b"hint of %d" % n)]
    return set(client.lookup(keys, presence_only=True).missing)


@pytest.mark.parametrize("is_over_news", [False, True], ids=["whole", "news"])
@pytest.mark.parametrize("drops", LIES, ids=NAMES)
def test_nothing_is_proved_of_what_a_peer_acknowledged_and_did_not_keep(
    tmp_path: Path, drops: Drops, is_over_news: bool
) -> None:
    with (
        running_node(tmp_path / "one") as one,
        running_node(tmp_path / "two") as two,
        StoreClient(one.url, token=token_for(one.url)) as client,
        StoreClient(two.url, token=token_for(two.url)) as upstream,
    ):
        lies = [False]
        with lying_peer(two.url, lambda item: lies[0] and drops(item)) as url:
            publish(upstream, 0, 308)
            publish(client, 0, 308)
            if is_over_news:
                assert finished(client, client.start_sync(url).id)["proved"]
            lies[0] = True
            publish(client, 308, 643)
            seen = []
            for _ in range(3):
                report = finished(client, client.start_sync(url).id)
                lacking = len(missing(upstream, 643))
                seen.append((report["outcome"], report["proved"], lacking))
                assert not (report["proved"] and lacking), seen
                if report["outcome"] == "peer_fault":
                    assert re.search(r"acknowledged.*[0-9a-f]{64}", report["detail"]), report
            # A peer that never keeps it is found out at once, and each time.
            assert {each[0] for each in seen if each[2]} <= {"peer_fault"}, seen


def test_the_next_session_names_what_a_peer_acknowledged_and_dropped_later(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "one") as one,
        StoreClient(one.url, token=token_for(one.url)) as client,
    ):
        replica = Forgetful()
        with forgetful_peer(replica) as url:
            for n in range(20):
                client.publish(message(n))
            assert finished(client, client.start_sync(url).id)["proved"]
            for n in range(20, 40):
                client.publish(message(n))
            report = finished(client, client.start_sync(url).id)
            assert (report["proved"], report["detail"]) == (True, "")
            gone = [replica.element(encode(message(n))) for n in (25, 30)]
            replica.forget(gone)
            result = cli("sync", url, "--node", one.url)
            report = client.syncs()[0].document["report"]
            assert (report["outcome"], report["proved"]) == ("in_sync", True)
            assert len(replica.contents) == 40
            said = result.out + result.err
            for each in gone:
                assert each.element_id.hex() in report["detail"]
                assert each.element_id.hex() in "".join(said.split())
            assert finished(client, client.start_sync(url).id)["detail"] == ""
