"""Drivers of these tests tick twenty times a second."""

import pytest

from sdstore.participant import driver


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TICK_S", 0.05)
