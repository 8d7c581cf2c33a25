"""Rate limits: a full bucket at first, a steady rate after it, and a bounded memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest

from app.access import rates as module
from app.access.callers import Caller, Rate, Scope
from app.access.rates import Rates
from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings

LIMITS = replace(
    DEFAULT_LIMITS,
    anonymous_requests_per_minute=60,
    anonymous_bytes_per_minute=6_000,
    caller_requests_per_minute=6_000,
    anonymous_live_readers_max=2,
    live_readers_max=6,
)


class Clock:
    now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def caller(name: str, rate: Rate = Rate.ANONYMOUS) -> Caller:
    return Caller(name, frozenset({Scope.OPEN}), rate=rate)


def refused(rates: Rates, name: str, rate: Rate = Rate.ANONYMOUS) -> int:
    """Seconds to wait."""
    with pytest.raises(Problem) as caught:
        rates.admit(caller(name, rate))
    assert (caught.value.code, caught.value.status) == (Code.RATE_LIMITED, 429)
    return int(caught.value.headers["Retry-After"])


def test_a_stranger_spends_a_full_bucket_at_once_and_then_its_rate(clock: Clock) -> None:
    rates = Rates(LIMITS)
    for _ in range(60):
        rates.admit(caller("a"))
    assert refused(rates, "a") == 1
    # Others have their own, and a token has more.
    rates.admit(caller("b"))
    for _ in range(1_000):
        rates.admit(caller("a", Rate.CALLER))
    clock.now_s += 2
    rates.admit(caller("a"))
    rates.admit(caller("a"))
    assert refused(rates, "a") == 1
    clock.now_s += 3_600
    for _ in range(60):
        rates.admit(caller("a"))
    refused(rates, "a")


def test_bytes_overdraw_the_bucket_and_the_wait_is_as_long_as_it_says(clock: Clock) -> None:
    rates = Rates(LIMITS)
    rates.admit(caller("a")).spend(6_000 + 500)
    wait_s = refused(rates, "a")
    assert wait_s == 5
    clock.now_s += wait_s - 0.1
    refused(rates, "a")
    clock.now_s += 0.2
    rates.admit(caller("a"))


def test_a_minute_of_rest_refills_a_bucket_once_and_no_more(clock: Clock) -> None:
    rates = Rates(LIMITS)
    rates.admit(caller("a")).spend(5_000)
    clock.now_s += 60
    spent = [rates.admit(caller("a")) for _ in range(60)]
    refused(rates, "a")
    clock.now_s += 60
    spent[0].spend(6_000)
    rates.admit(caller("a")).spend(1)
    refused(rates, "a")


def test_in_any_time_a_caller_gets_one_full_bucket_and_its_rate(clock: Clock) -> None:
    random, rates = Random(7), Rates(LIMITS)
    admitted = []
    for _ in range(5_000):
        clock.now_s += random.choice((0, 0, 0.01, 0.5, 20))
        with suppress(Problem):
            rates.admit(caller("a"))
            admitted.append(clock.now_s)
    assert len(admitted) > 1_000
    for at, start_s in enumerate(admitted):
        most = 60 + int(admitted[-1] - start_s + 1e-3)
        assert len(admitted) - at <= most
        within = sum(start_s <= each <= start_s + 10 for each in admitted[at : at + 100])
        assert within <= 70


def test_who_spent_a_bucket_has_spent_the_one_of_new_settings_too(clock: Clock) -> None:
    rates = Rates(LIMITS)
    for _ in range(30):
        rates.admit(caller("a"))
    rates.configure(Settings(anonymous_requests_per_minute=10))
    for _ in range(5):
        rates.admit(caller("a"))
    assert refused(rates, "a") == 6
    clock.now_s += 60
    for _ in range(10):
        rates.admit(caller("a"))
    refused(rates, "a")


def test_live_streams_are_bounded_for_each_stranger_and_for_all_together() -> None:
    rates = Rates(LIMITS)
    first, second = rates.admit(caller("a")), rates.admit(caller("b"))
    rates.begin_live(first)
    rates.begin_live(first)
    with pytest.raises(Problem):
        rates.begin_live(first)
    rates.begin_live(second)
    with pytest.raises(Problem):
        rates.begin_live(second)  # three of six places are for others
    rates.end_live(first)
    rates.begin_live(second)
