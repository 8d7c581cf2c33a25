"""What a world consists of and what goes wrong in it: a function of a seed.

Each schedule enables its own random subset of the faults, most with a strength of its own ("swarm
testing"): a world with everything at once hides what two faults together would show.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random

from sdstore.sds import Dialect
from sdstore.sds.bloom import Form
from sdstore.sds.model import SHA256_CONTENT, SHA256_MESSAGE
from sdstore.sds.options import LamportUnit, OnLost, ParticipantOptions
from sdstore.sds.repair import RepairOptions

CHANNEL = "simulated"

SECOND_MS = 1_000
MINUTE_MS = 60_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS

NEVER_MS = 30 * DAY_MS
"""A time to wait for the lost that is longer than a world lasts."""

OFFSETS_MS = (HOUR_MS, -HOUR_MS, 20 * HOUR_MS, 2 * DAY_MS, -2 * DAY_MS, YEAR_MS, -YEAR_MS)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """One participant, with the habits of its clock, its disk and its application."""

    name: str
    options: ParticipantOptions
    offset_ms: int
    tick_ms: int
    talks: float
    """Its share of the messages, beside those of the others."""
    combines: bool
    """Its executor writes several `Save` effects together, before the other effects."""
    confirm_ms: int
    """The longest pause before the application confirms; 0: at once."""
    confirms_at_start: bool
    knows_own_hints: bool
    uses_store: bool
    destroyed_at_ms: int
    """When it leaves for ever, with its disk; 0: never."""

    @property
    def holds(self) -> bool:
        return self.options.on_lost is OnLost.HOLD


@dataclass(frozen=True, slots=True)
class Schedule:
    """See the module. Odds are from 0 to 1, times in virtual ms."""

    seed: int
    peers: tuple[PeerPlan, ...]
    messages_count: int
    faulty_ms: int
    loss: float
    repeat: float
    echo: float
    delay_ms: int
    ephemeral: float
    partitions_count: int
    partition_ms: int
    crashes_count: int
    crash_in_effects: float
    jumps_count: int
    jumps_ms: tuple[int, ...]
    has_store: bool
    store_relays: bool
    outages_count: int
    backfills_count: int
    backfills_at_the_end: bool
    has_hints: bool
    repairs: bool
    attacks_count: int
    is_cramped: bool
    """Buffers are so small that they overflow."""

    @property
    def clocks_differ(self) -> bool:
        return self.jumps_count > 0 or any(peer.offset_ms for peer in self.peers)

    @property
    def attacks(self) -> bool:
        return self.attacks_count > 0

    def __str__(self) -> str:
        flags = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if each.name != "peers" and getattr(self, each.name) not in (0, False)
        ]
        return f"{len(self.peers)} peers, " + ", ".join(flags)


def schedule_of(seed: int, *, peers_max: int = 50) -> Schedule:
    """The schedule of a seed."""
    random = Random(f"schedule {seed}")

    def sometimes(odds: float) -> bool:
        return random.random() < odds

    is_large = sometimes(0.004)
    count = random.randint(6, peers_max) if is_large else random.choice([2, 2, 3, 3, 3, 4, 5])
    faulty_ms = random.choice([MINUTE_MS, 3 * MINUTE_MS, 10 * MINUTE_MS])
    has_store = sometimes(0.5)
    attacks = sometimes(0.2)
    is_cramped = sometimes(0.15)
    repairs = sometimes(0.5)
    destroys = sometimes(0.15)
    clocks_differ = sometimes(0.4)
    mixes = sometimes(0.15)
    common = _common_options(random, repairs=repairs)
    if attacks:  # nothing can be recovered that an attacker only named
        common = replace(common, lost_after_ms=random.choice([20 * SECOND_MS, 2 * MINUTE_MS]))
    peers = []
    for number in range(count):
        options = _options(random, common, mixes=mixes, is_cramped=is_cramped, attacks=attacks)
        options = replace(options, seed=b"%d of %d" % (number, seed))
        offset_ms = random.choice(OFFSETS_MS) if clocks_differ and sometimes(0.5) else 0
        peers.append(
            PeerPlan(
                name=f"p{number}",
                options=options,
                offset_ms=offset_ms,
                tick_ms=random.choice([500, 1_000, 1_000, 3_000]) * (3 if is_large else 1),
                talks=random.choice([0.2, 1.0, 1.0, 3.0]),
                combines=sometimes(0.3),
                confirm_ms=random.choice([0, 0, 500, 20_000]),
                confirms_at_start=sometimes(0.5),
                knows_own_hints=sometimes(0.5),
                uses_store=has_store and sometimes(0.9),
                destroyed_at_ms=random.randint(1, faulty_ms)
                if destroys and number and sometimes(0.5)
                else 0,
            )
        )
    return Schedule(
        seed=seed,
        peers=tuple(peers),
        messages_count=random.randint(1, 20) if is_large else random.randint(1, 50),
        faulty_ms=faulty_ms,
        loss=random.uniform(0, 0.4) if sometimes(0.7) else 0.0,
        repeat=random.uniform(0, 0.4) if sometimes(0.4) else 0.0,
        echo=0.5 if sometimes(0.2) else 0.0,
        delay_ms=random.choice([20, 500, 5_000, 30_000]),
        ephemeral=0.2 if sometimes(0.2) else 0.0,
        partitions_count=random.randint(1, 4) if sometimes(0.3) else 0,
        partition_ms=random.choice([20_000, 120_000, 400_000]),
        crashes_count=random.randint(1, 8) if sometimes(0.4) else 0,
        crash_in_effects=random.choice([0.01, 0.05]) if sometimes(0.3) else 0.0,
        jumps_count=random.randint(1, 5) if sometimes(0.25) else 0,
        jumps_ms=(MINUTE_MS, -MINUTE_MS, *OFFSETS_MS),
        has_store=has_store,
        store_relays=has_store and sometimes(0.5),
        outages_count=random.randint(1, 3) if has_store and sometimes(0.5) else 0,
        backfills_count=random.randint(1, 4) if has_store and sometimes(0.4) else 0,
        backfills_at_the_end=has_store and sometimes(0.3),
        has_hints=has_store and sometimes(0.5),
        repairs=repairs,
        attacks_count=random.randint(1, 12) if attacks else 0,
        is_cramped=is_cramped,
    )


def _common_options(random: Random, *, repairs: bool) -> ParticipantOptions:
    """The options that all participants of a channel share."""
    dialects = [Dialect.V2, Dialect.V2, Dialect.NIM]
    if not repairs:
        dialects += [Dialect.CHAT_PROTO, Dialect.V1]
    small = random.random() < 0.8
    return ParticipantOptions(
        dialect=random.choice(dialects),
        id_scheme=random.choice([SHA256_MESSAGE, SHA256_MESSAGE, SHA256_CONTENT]),
        bloom=random.choice([None, Form.JS, Form.JS, Form.NIM]),
        bloom_capacity=random.choice([20, 100]) if small else 10_000,
        lost_after_ms=random.choice([20 * SECOND_MS, 2 * MINUTE_MS, NEVER_MS, NEVER_MS]),
        repair=_repair(random) if repairs else None,
    )


def _repair(random: Random) -> RepairOptions:
    t_min_ms = random.choice([0, 1_000, 5_000])
    return RepairOptions(
        t_min_ms=t_min_ms,
        t_max_ms=t_min_ms + random.choice([1_000, 10_000]),
        requests_per_message=random.choice([2, 10]),
        answers_per_requester=random.choice([3, 30]),
    )


def _options(
    random: Random, common: ParticipantOptions, *, mixes: bool, is_cramped: bool, attacks: bool
) -> ParticipantOptions:
    resend_ms = random.choice([1_000, 5_000])
    options = replace(
        common,
        dialect=random.choice([*Dialect]) if mixes else common.dialect,
        lamport_unit=LamportUnit.SECONDS if mixes else None,
        history_size=random.choice([0, 1, 2, 2, 2, 5]),
        on_lost=OnLost.HOLD if random.random() < 0.2 and not attacks else OnLost.DELIVER,
        resend_ms=resend_ms,
        resend_possibly_ms=resend_ms * random.choice([2, 4]),
        resend_ms_max=random.choice([20_000, 120_000]),
        attempts_max=random.choice([3, 10, 40]),
        sync_ms=random.choice([3_000, 10_000]),
        sync_ms_max=random.choice([20_000, 60_000]),
        fetch_retry_ms=random.choice([500, 3_000]),
        lost_retry_ms=random.choice([5_000, 30_000]),
        fetch_retry_ms_max=random.choice([10_000, 60_000]),
        deliveries_max=random.choice([1, 3, 1_000]),
        reviewed_per_filter=random.choice([1, 32]),
    )
    if is_cramped:
        options = replace(
            options,
            waiting_max=random.choice([1, 2, 5]),
            waiting_bytes_max=random.choice([600, 100_000]),
            missing_max=random.choice([2, 12, 300]),
            noted_max=random.choice([2, 20]),
            lost_max=random.choice([2, 20]),
            sync_ids_max=random.choice([2, 20]),
            heads_max=1_000 if attacks else random.choice([12, 1_000]),
            sent_max=random.choice([3, 10_000]),
            hints_max=random.choice([3, 100]),
            fetches_per_effect=random.choice([1, 10]),
            resends_per_tick=random.choice([1, 64]),
        )
    return options
