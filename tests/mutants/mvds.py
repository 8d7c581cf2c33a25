"""Faults planted in the MVDS node."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FLOWS = ("tests/mvds/test_flows.py",)
_WORLDS = ("tests/mvds/test_simulation.py",)
_BOTH = (*_FLOWS, *_WORLDS)


def _fault(name: str, right: str, wrong: str, tests: tuple[str, ...] = _BOTH) -> Fault:
    return Fault(f"mvds: {name}", "sdstore/mvds/node.py", right, wrong, tests)


FAULTS = [
    _fault("an ack is kept in state", "            self._acknowledge(peer, message_id)\n\n    def postponed", "            self._state.put(peer, [Record(RecordType.MESSAGE, message_id)])\n\n    def postponed"),
    _fault("a record is sent early", "self._state.due(peer, epoch, room", "self._state.due(peer, epoch + 1, room", _WORLDS),
    _fault("a request is dropped", "                self._state.put(peer, [Record(RecordType.MESSAGE, message_id)])\n", "                pass\n"),
    _fault("the wait does not grow", "min(record.send_count, self._silent_count.get(peer, 0), 32)", "0", _FLOWS),
    _fault("the wait has no limit", "min(doubled, options.retry_epochs_max)", "doubled", _FLOWS),
    _fault("a peer that answers is waited for like a silent one", "        self._silent_count.pop(peer, None)\n", "", _FLOWS),
    _fault("a repeated message is not acknowledged", "            if self._messages.is_known(message_id):\n                self._acknowledge(peer, message_id)\n            elif message_id in self._in_process:", "            if self._messages.is_known(message_id):\n                pass\n            elif message_id in self._in_process:"),
    _fault("an offer of what we hold is not acknowledged", "                effects += self._take_acknowledged(peer, [message_id])\n                self._acknowledge(peer, message_id)\n            elif self._state.get", "                effects += self._take_acknowledged(peer, [message_id])\n            elif self._state.get", _FLOWS),
    _fault("a message is acknowledged before it is dealt with", "                effects.append(Deliver(peer, message))\n", "                effects.append(Deliver(peer, message))\n                self._acknowledge(peer, message_id)\n", _FLOWS),
    _fault("the second giver gets no ack", "                self._in_process[message_id].add(peer)\n", "                pass\n", _FLOWS),
    _fault("a request gives anything", "record is not None and record.type is RecordType.OFFER:", "record is None or record.type is RecordType.OFFER:", _FLOWS),
    _fault("anybody may give", "if peer not in self._groups.get(message.group_id, ()):", "if False:", _FLOWS),
    _fault("records of a peer have no bound", "if self._state.count(peer) >= self._options.records_per_peer_max:", "if False:", _FLOWS),
    _fault("offers have no bound", "if len(requests) < room:", "if True:", _FLOWS),
    _fault("two payloads in one epoch", "if epoch <= self._sent_epoch.get(peer, -1):", "if False:", _FLOWS),
    _fault("a payload has no bound", "                if size > room:\n                    break  #", "                if False:\n                    break  #", _FLOWS),
    _fault("acks fill the payload", "room // 2 // ID_FIELD_BYTES)", "room // ID_FIELD_BYTES)", _FLOWS),
    _fault("nothing is given up", "return 0 < most <= record.send_count", "return False", _FLOWS),
    _fault("an ack ends nothing", "                self._state.remove(peer, [message_id])\n                effects.append(Acknowledged", "                effects.append(Acknowledged", _FLOWS),
]  # fmt: skip
