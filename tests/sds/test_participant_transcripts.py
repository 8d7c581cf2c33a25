"""Conversations between participants of this library, each with everything that happens in it.

The files in `transcripts` hold them; a file's name is what it shows. A line is an event, `->`, and all
effects of it. Messages are called by their content. A frame reaches those who hear it. Time passes for
everybody, with a tick each second; indented lines are the effects.

`python -m tests.sds.test_participant_transcripts` writes the effects anew. Read the difference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sdstore.sds import (
    Acknowledged,
    Broadcast,
    Deliver,
    Effect,
    Ephemeral,
    GaveUp,
    Kind,
    Lost,
    Missing,
    OnLost,
    ParticipantOptions,
    PossiblyAcknowledged,
    Status,
    StoredRemotely,
    decode,
)
from sdstore.sds.bloom import Form
from sdstore.sds.repair import RepairOptions
from tests.support.participants import Device

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
NEVER_MS = 10**9

QUIET = ParticipantOptions(
    bloom=None, sync_ms=0, repair=None, resend_ms=NEVER_MS, resend_ms_max=NEVER_MS
)
SYNCING = replace(QUIET, sync_ms=30_000, fetch_retry_ms=NEVER_MS, fetch_retry_ms_max=NEVER_MS)
OPTIONS = {  # a transcript names them in its first line
    "quiet": QUIET,
    "holding": replace(QUIET, on_lost=OnLost.HOLD),
    "filtering": replace(QUIET, bloom=Form.JS),
    "syncing": SYNCING,
    "repairing": replace(SYNCING, repair=RepairOptions()),
    "resending": ParticipantOptions(bloom=None, sync_ms=0, repair=None, attempts_max=6),
}


TEMPLATES: dict[type, str] = {
    Acknowledged: "{} acknowledged",
    PossiblyAcknowledged: "{} possibly acknowledged",
    StoredRemotely: "a store has {}",
    GaveUp: "gives {} up",
    Lost: "{} lost",
}


@dataclass
class Room:
    """Devices by name, and every frame by its text."""

    options: ParticipantOptions
    devices: dict[str, Device] = field(default_factory=dict)
    frames: dict[str, bytes] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # by message ID
    now_s: int = 0

    def device(self, name: str) -> Device:
        if name not in self.devices:
            self.devices[name] = Device(name, replace(self.options, seed=name.encode()))
            self.devices[name].now_ms += 1_000 * self.now_s
        return self.devices[name]

    def play(self, line: str) -> list[str]:
        """The lines that a line of a transcript becomes."""
        if match := re.fullmatch(r"(\d+) s pass", line):
            return [line, *self.wait(int(match[1]))]
        name, verb, *rest = line.split(maxsplit=2)
        device, given = self.device(name), "".join(rest)
        before = len(device.effects)
        if verb == "says":
            self.know(given, device.say(given))
        elif verb == "hears":
            device.hear(self.frames[given])
        elif verb == "types":
            effects = device.participant.send(given.encode(), device.now_ms, ephemeral=True)
            self.know(given, device.carry_out(effects)[0].frame)  # type: ignore[union-attr]
        elif verb == "stored":
            message_id = decode(self.frames[given])[0].message_id
            device.carry_out(device.participant.stored(message_id))
        else:
            assert verb == "crashes"
            device.crash()
            device.carry_out(device.participant.tick(device.now_ms))
        words = self.words(device.effects[before:])
        return [f"{line} -> {words}" if words else line]

    def know(self, text: str, frame: bytes) -> None:
        self.frames[text] = frame
        self.texts[decode(frame)[0].message_id] = text

    def wait(self, seconds: int) -> list[str]:
        """A tick each second; a line for each participant to which something happens."""
        lines = []
        for _ in range(seconds):
            self.now_s += 1
            for name, device in self.devices.items():
                if words := self.words(device.wait(1)):
                    lines.append(f"  {self.now_s} s {name} -> {words}")
        return lines

    def words(self, effects: list[Effect]) -> str:
        return "; ".join(filter(None, map(self.word, effects)))

    def word(self, effect: Effect) -> str:
        if (template := TEMPLATES.get(type(effect))) is not None:
            return template.format(self.name_of(effect.message_id))  # type: ignore[union-attr]
        match effect:
            case Broadcast():
                return self.word_of_frame(effect)
            case Deliver():
                gap = ", ".join(map(self.name_of, effect.after_gap))
                late = " late" if effect.is_late else ""
                text = effect.message.content.decode()
                return f"delivers {effect.number} {text}{late}" + (f" without {gap}" if gap else "")
            case Missing():
                return "misses " + ", ".join(self.name_of(e.message_id) for e in effect.entries)
            case Ephemeral():
                return f"shows {effect.message.content.decode()}"
            case Status():
                return f"[{effect}]"
            case _:
                return ""

    def word_of_frame(self, sent: Broadcast) -> str:
        message, _ = decode(sent.frame)
        if sent.kind is Kind.SYNC:
            self.know(f"{message.sender_id}'s sync", sent.frame)
        elif sent.kind is Kind.EPHEMERAL:
            return "sends it"
        words = f"sends {self.name_of(sent.message_id)}"
        if message.causal_history:
            words += " after " + ", ".join(
                self.name_of(e.message_id) for e in message.causal_history
            )
        if message.repair_request:
            words += "; asks for " + ", ".join(
                self.name_of(e.message_id) for e in message.repair_request
            )
        return words

    def name_of(self, message_id: str) -> str:
        return self.texts.get(message_id, message_id)


def replayed(transcript: str) -> str:
    """The transcript with the effects that its events have now."""
    comments = [line for line in transcript.splitlines() if line.startswith("#")]
    room = Room(OPTIONS[comments[0].removeprefix("# ")])
    lines = comments
    for line in transcript.splitlines():
        if not line.startswith(("#", " ")):
            lines += room.play(line.partition(" -> ")[0])
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    transcript = path.read_text(encoding="utf-8")
    assert replayed(transcript) == transcript


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 12


if __name__ == "__main__":
    for path in TRANSCRIPTS:
        path.write_text(replayed(path.read_text(encoding="utf-8")), encoding="utf-8")
