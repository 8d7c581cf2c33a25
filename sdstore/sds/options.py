"""What a participant can be configured to do, and the bounds of everything that it keeps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from sdstore.errors import LocalProtocolError
from sdstore.sds.bloom import CAPACITY, ERROR_RATE, Form
from sdstore.sds.model import LAMPORT_MAX, SHA256_MESSAGE, Dialect, IdScheme, Rank
from sdstore.sds.repair import RepairOptions

INT32_MAX = 2**31 - 1


class LamportUnit(enum.IntEnum):
    """The unit of the clock that Lamport timestamps follow; the value is how many are in a second.

    Nanoseconds are those of version 1 by its letter. All participants of a channel need one unit: a timestamp
    of a smaller one is too far ahead to be followed (`clock_ahead_ms`).
    """

    SECONDS = 1
    MILLISECONDS = 1_000
    NANOSECONDS = 1_000_000_000


class OnLost(enum.Enum):
    """What happens to messages whose causes are lost."""

    DELIVER = "deliver"
    """They are delivered, with the lost causes in `Deliver.after_gap`."""

    HOLD = "hold"
    """They wait until the causes arrive after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantOptions:
    """Behaviour and bounds of a participant. All participants of a channel should agree on those
    under "Shared by the channel"."""

    # ---- shared by the channel

    dialect: Dialect = Dialect.V2
    """The dialect of our frames. All dialects are read."""
    lamport_unit: LamportUnit | None = None
    """`None`: milliseconds in V2, seconds in V1 and CHAT_PROTO (whose field is an int32) and in NIM."""
    id_scheme: IdScheme = SHA256_MESSAGE
    """Makes the IDs of our content messages. js-waku's is `SHA256_CONTENT`."""
    bloom: Form | None = Form.JS
    """The form of the filter in our messages; `None`: our messages carry none. All forms are read."""
    bloom_capacity: int = CAPACITY
    """IDs in our filter. At the capacity it is made anew from the newest half of them."""
    bloom_error_rate: float = ERROR_RATE
    """js-waku reads only filters of the default capacity and error rate."""

    # ---- what our messages refer to

    history_size: int = 2
    """Newest messages in a causal history; the specification recommends two."""
    history_max: int = 10
    """Entries of a causal history with the heads: a head is a message that no other one refers to.
    A chat of ten people who write at once has ten; more heads wait for the next messages."""
    heads_max: int = 1_000
    """Heads remembered, 0.3 MB. At the bound a tenth of them is forgotten, those beyond our clock first,
    then the oldest: they are in the log, but our messages no longer refer to them."""

    ordered: bool = False
    """We write as an indexer of docs/ordering.md: each content message of ours names our own previous one first,
    then every message that our view lacks, up to `history_read_max`. Needs a sender with an ID; set it before the
    first message."""
    indexers: tuple[str, ...] = ()
    """The indexers, in ordered mode: what another indexer's message names, ours need not name, and an indexer's
    message that names what we cannot get is not named. Without them everything that we receive is named."""

    # ---- clocks

    clock_ahead_ms: int = 24 * 3_600_000
    """A received timestamp more than this ahead of `now_ms` does not move our Lamport clock. A day
    covers clocks set to the wrong time zone."""
    clock_step_max_ms: int = 60_000
    """Time-outs count at most this between two calls, and nothing when `now_ms` goes back: after a
    sleep or a changed clock they do not all expire at once."""

    # ---- resending

    resend_ms: int = 30_000
    """The first pause before an unacknowledged message is broadcast again. It doubles each time."""
    resend_possibly_ms: int = 120_000
    """The same for messages that are possibly acknowledged, or that a store has."""
    resend_ms_max: int = 1_800_000
    """The longest pause, 30 minutes."""
    attempts_max: int = 10
    """Broadcasts of a message, then `GaveUp`: 2.6 hours with the default pauses."""
    resends_per_tick: int = 64
    """Messages that one tick broadcasts again; the others follow at the next tick."""
    sent_max: int = 10_000
    """Own messages whose state is remembered, 3 MB. At the bound the oldest is forgotten, with
    `GaveUp` if it is still unacknowledged."""

    # ---- acknowledgement by bloom filter

    filter_fp_max: float = 0.05
    """A filter with a higher false-positive rate is ignored: it is (nearly) saturated. At capacity the
    rate is 0.001, at twice the capacity, which js-waku reaches, 0.047."""
    acknowledged_fp_max: float = 1e-5
    """A message in several filters is acknowledged when the probability that all of them contain it by
    chance is at most this: one wrong acknowledgement in a hundred thousand messages. Filters of less
    than 2,000 bits never prove as much."""
    reviewed_per_filter: int = 32
    """Unacknowledged messages looked up in one received filter, about 10 µs. With more of them,
    the next filters continue where this one stopped."""

    # ---- what others wrote

    rank_min: Rank = Rank.UNKNOWN
    """Content whose ID proves less is ignored. By default all is delivered, with its rank."""

    # ---- waiting for causes

    lost_after_ms: int = 300_000
    """A missing message is lost after 5 minutes: SDS-R answers within 2, a store within seconds."""
    on_lost: OnLost = OnLost.DELIVER
    """`DELIVER`: messages whose causes are lost are delivered after a gap. `HOLD`: they wait on."""
    fetch_retry_ms: int = 10_000
    """The pause before `Missing` names a message again. It doubles each time."""
    fetch_retry_ms_max: int = 120_000
    """The longest pause, until the message is lost."""
    lost_retry_ms: int = 600_000
    """The pause before `Missing` names a lost message again, first 10 minutes. It doubles each time, so
    what is lost for good costs ever less, and what a partition kept away is found after it."""
    fetches_per_effect: int = 100
    """Messages in one `Missing` effect: a lookup of a store takes 100 keys."""
    waiting_max: int = 4_096
    """Messages that wait for their causes. At the bound, the sender with most of them loses its
    oldest: it is delivered after a gap, or dropped under `OnLost.HOLD`."""
    waiting_bytes_max: int = 16 << 20
    """Their frames in bytes, with the same rule."""
    missing_max: int = 16_384
    """IDs that waiting messages miss, 8 MB, with the same rule."""
    noted_max: int = 1_000
    """IDs that are missing although no message waits for them: sync messages named them, or messages that
    gave way. At the bound one is forgotten, with the same rule, or lost if a delivered message skipped it."""
    history_read_max: int = 256
    """Entries of a received causal history, the bound of a store. A message with more is ignored."""
    lost_max: int = 10_000
    """Lost IDs remembered, 2 MB, with the same rule; a message that names a forgotten one waits again. As
    many IDs are remembered that delivered messages skipped, to mark what arrives late."""
    sync_ids_max: int = 1_000
    """IDs of sync messages remembered, because participants of version 1 name them as causes. The oldest
    is forgotten first."""

    # ---- sync messages

    sync_ms: int = 30_000
    """The longest pause before our first sync message in a quiet channel; 0: never send any.
    A sync message is also sent when a repair request is due."""
    sync_ms_max: int = 300_000
    """The pause doubles with each sync message of ours up to 5 minutes, until content arrives."""
    repair: RepairOptions | None = field(default_factory=RepairOptions)
    """SDS-R: what to ask other participants for, and to answer; `None`: neither. Requests need a dialect
    that has them (V2, NIM) and senders with IDs."""
    sync_when_empty: bool = False
    """Send sync messages while the log is empty."""
    seed: bytes = b""
    """Enters the hash that all random choices come from. Give each simulated participant its own."""

    # ---- towards the application

    deliveries_max: int = 1_000
    """Deliveries that the application has not confirmed. Later ones wait in the log."""
    hints_max: int = 4_096
    """Messages whose retrieval hints are remembered, 2 MB. The oldest are forgotten first."""
    hints_per_message: int = 4
    """Retrieval hints of one message: a message can be in several stores under different keys."""

    def __post_init__(self) -> None:
        """Raises `LocalProtocolError` (`bad_option`) for values that make no sense."""
        if not 0 <= self.history_size <= self.history_max <= self.history_read_max:
            raise LocalProtocolError(
                "bad_option", "0 <= history_size <= history_max <= history_read_max does not hold"
            )
        if self.ordered and self.dialect is Dialect.V1:
            raise LocalProtocolError("bad_option", "`ordered` needs a sender; dialect V1 has none")
        for name in (
            "attempts_max", "clock_step_max_ms", "deliveries_max", "fetch_retry_ms",
            "fetches_per_effect", "heads_max", "hints_max", "hints_per_message", "lost_after_ms",
            "lost_max", "lost_retry_ms", "missing_max", "noted_max", "resend_ms", "resends_per_tick", "sent_max",
            "sync_ids_max", "waiting_bytes_max", "waiting_max",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise LocalProtocolError(
                    "bad_option", f"{name} is {getattr(self, name)}, and must be at least 1"
                )

    @property
    def unit(self) -> LamportUnit:
        """The Lamport unit in use."""
        if self.lamport_unit is not None:
            return self.lamport_unit
        return LamportUnit.MILLISECONDS if self.dialect is Dialect.V2 else LamportUnit.SECONDS

    def lamport_at(self, now_ms: int) -> int:
        """A time since the epoch in the Lamport unit."""
        return now_ms * self.unit // 1_000

    @property
    def lamport_max(self) -> int:
        """The highest Lamport timestamp that the dialect can express."""
        is_int32 = self.dialect in {Dialect.V1, Dialect.CHAT_PROTO}
        return INT32_MAX if is_int32 else LAMPORT_MAX
