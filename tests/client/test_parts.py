"""The pure parts of the clients: retry, batching, bounded bodies, both clients alike."""

import asyncio
import inspect
import signal
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdstore.client import (
    AsyncStoreClient,
    ClientOptions,
    PublishItem,
    Retry,
    StoreClient,
    StoreError,
)
from sdstore.client.exchange import Batcher, BoundedBody, batches, network_reason
from sdstore.errors import error_of_reply

UNREACHABLE = StoreError("unreachable", 0, "x")


def busy(retry_after_s: float | None) -> StoreError:
    return StoreError("overloaded", 503, "x", retry_after_s=retry_after_s)


def test_the_pause_doubles_up_to_its_bound() -> None:
    retry = Retry(attempts_max=10, backoff_s=1.0, backoff_max_s=6.0)
    for attempt, whole_s in [(1, 1.0), (2, 2.0), (3, 4.0), (4, 6.0), (9, 6.0)]:
        delay_s = retry.delay_s(attempt, UNREACHABLE)
        assert delay_s is not None
        assert whole_s / 2 <= delay_s <= whole_s


def test_the_last_attempt_is_the_last() -> None:
    assert Retry(attempts_max=2).delay_s(1, UNREACHABLE) is not None
    assert Retry(attempts_max=2).delay_s(2, UNREACHABLE) is None


def test_the_nodes_own_pause_is_kept_unless_it_is_too_long() -> None:
    delays_s = {Retry().delay_s(1, busy(8.0)) for _ in range(20)}
    # Clients that were refused together do not return together.
    assert len(delays_s) > 1
    assert all(delay_s is not None and 8.0 <= delay_s <= 12.0 for delay_s in delays_s)
    assert Retry(retry_after_max_s=6.0).delay_s(1, busy(7.0)) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-1", None), ("٧", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)],
)
def test_retry_after_is_read_in_seconds(header: str, seconds: float | None) -> None:
    assert error_of_reply(503, {"retry-after": header}, b"").retry_after_s == seconds


def test_the_reason_of_a_failed_call_is_the_systems_own() -> None:
    async def reason(url: str) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError) as failed:
                await client.get(url)
        return network_reason(failed.value)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert asyncio.run(reason(f"http://127.0.0.1:{port}")) == "Connection refused"

    unknown_ca = httpx.ConnectError("x")
    unknown_ca.__cause__ = ssl.SSLCertVerificationError(1, "long")
    unknown_ca.__cause__.verify_message = "unable to get local issuer certificate"
    assert (
        network_reason(unknown_ca)
        == "the certificate is not trusted: unable to get local issuer certificate"
    )
    assert {network_reason(each) for each in (TimeoutError(), httpx.ReadTimeout(""))} == {
        "no answer in time"
    }
    assert network_reason(httpx.ReadError("")) == "ReadError"


@given(
    st.lists(st.binary(max_size=60), max_size=60),
    st.integers(1, 10),
    st.integers(1, 200),
)
@settings(deadline=None, max_examples=200)
def test_batches_keep_all_frames_in_order_and_keep_their_bounds(
    frames: list[bytes], items_max: int, bytes_max: int
) -> None:
    cut = list(batches(frames, Batcher(items_max, bytes_max)))
    assert [item.frame for batch in cut for item in batch] == frames
    for batch in cut:
        assert 1 <= len(batch) <= items_max
        assert len(batch) == 1 or sum(len(item.frame) for item in batch) <= bytes_max


def test_hints_count_towards_the_size_of_a_batch() -> None:
    items = [PublishItem(b"f", (bytes(100),)) for _ in range(4)]
    assert [len(batch) for batch in batches(items, Batcher(bytes_max=300))] == [2, 2]


def test_an_answer_that_drips_past_the_deadline_is_a_timeout() -> None:
    body = BoundedBody(ClientOptions(deadline_s=10.0), now_s=100.0)
    body.feed(b"x", 110.0)
    with pytest.raises(StoreError) as refused:
        body.feed(b"x", 110.1)
    assert refused.value.code == "timeout"
    assert body.reply(httpx.Response(200)).body == b"x"


def public_methods(client: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    assert public_methods(StoreClient) == public_methods(AsyncStoreClient)


def test_the_blocking_client_works_inside_of_a_running_event_loop_and_in_many_threads() -> None:
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, stream=httpx.ByteStream(request.url.path.encode()))
    )

    async def inside() -> bytes:
        with StoreClient("http://node", transport=transport) as client:
            return client.recon(b"")

    assert asyncio.run(inside()) == b"/v1/recon"
    with StoreClient("http://node", transport=transport) as client, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(client.recon, [b""] * 200)) == {b"/v1/recon"}


def test_ctrl_c_ends_a_call_that_waits_for_the_network_and_one_that_waits_to_try_again() -> None:
    main = threading.main_thread().ident
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        patient = ClientOptions(retry=Retry(attempts_max=2, backoff_s=60, backoff_max_s=60))
        for url in (silent, "http://127.0.0.1:1"):
            timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
            started_s = time.monotonic()
            with StoreClient(url, options=patient) as client:
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    client.info()
            assert time.monotonic() - started_s < 5
