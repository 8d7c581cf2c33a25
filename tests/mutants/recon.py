"""Faults planted in the reconciliation engine."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`right` occurs exactly once in the file at `path`; `wrong` takes its place."""

    name: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


_T = "tests/recon/test_{}.py"
_SYNC = tuple(_T.format(name) for name in ("transcript", "sync", "oracle", "worklist"))
_INDEX = tuple(_T.format(name) for name in ("index", "oracle", "sync"))
_WIRE = tuple(_T.format(name) for name in ("codec", "transcript", "vectors", "sync"))
_LIARS = tuple(_T.format(name) for name in ("liars", "codec"))
_DISK = (_T.format("checkpoint"),)
_KEYS = tuple(_T.format(name) for name in ("session", "index", "vectors", "proof"))


def _fault(name: str, module: str, right: str, wrong: str, tests: tuple[str, ...]) -> Fault:
    return Fault(f"recon: {name}", f"recon/{module}.py", right, wrong, tests)


FAULTS = [
    # The table
    _fault("equal hashes suffice", "responder", "(hashes == asks.hashes).all(axis=1) & (counts == asks.counts)", "(hashes == asks.hashes).all(axis=1)", (_T.format("responder"),)),
    _fault("equal counts suffice", "responder", "same = (hashes == asks.hashes).all(axis=1) & (counts", "same = (counts", _SYNC),
    _fault("an empty side is not seen", "responder", "kinds[compared & (asks.counts == 0)] = COUNT", "pass", _SYNC),
    _fault("parts without ours are not fetched", "learning", "~parts.equal & (parts.ours == 0)", "parts.equal & (parts.ours == 0)", _SYNC),
    _fault("the rest of a prefix is dropped", "learning", "rest = self._work.take(slice(answered, None))", "rest = Work.none()", _SYNC),
    _fault("what we have is not told", "learning", "        self._have(found.have_rows)\n", "", _SYNC),
    _fault("what we have where they hold nothing is not told", "learning", "((reply.kinds == LIST) | is_empty_list)", "(reply.kinds == LIST)", (_T.format("responder"),)),
    _fault("lists of neighbours join across gaps", "worklist", "work.ranges.touches_next() & work.listed[1:]", "work.listed[1:]", _SYNC),
    _fault("lists join with comparisons", "worklist", "& work.listed[1:] & work.listed[:-1]", "& work.listed[1:]", _SYNC),
    _fault("a list means the same in every range", "learning", "ours = names_of(lanes) | ranges[owner]", "ours = names_of(lanes)", _SYNC),
    _fault("repeated short ids count twice", "learning", "    return names[firsts]\n", "    return names\n", (_T.format("liars"), _T.format("responder"))),
    _fault("a list that names one element often proves equality", "learning", "equal = counts == listed_counts", "equal = counts <= listed_counts", (_T.format("responder"),)),
    # Cuts
    _fault("cuts ignore ties", "cuts", "heads[tied] = rounded", "pass", _SYNC),
    _fault("inseparable elements are cut", "cuts", "parted = heads_below < heads_at", "parted = heads_below <= heads_at", _SYNC),
    _fault("bounds round too far", "cuts", "differing = (bit_lengths(below ^ at) - 1).astype(np.uint64)", "differing = bit_lengths(below ^ at).astype(np.uint64)", _WIRE),
    _fault("bit lengths round up", "elements", "exact = (values & ~(values >> np.uint64(1))).astype(np.float64)", "exact = values.astype(np.float64)", _WIRE),
    _fault("the phase is ignored by one side", "codec", "(256 * (within + 1) + phase - PHASE_NONE)", "(256 * (within + 1))", _WIRE),
    _fault("with several runs counts are implied", "cuts", "return Cuts(owner[sequence], orders, heads, None)", "return Cuts(owner[sequence], orders, heads, owner)", _SYNC),
    # The wire
    _fault("the last byte of a number is lost", "codec", "    used = groups != 0\n", "    used = groups != 0\n    used[:, 9:] = False\n", _WIRE),
    _fault("zigzag forgets the sign", "codec", "-(zigzag & np.uint64(1)).astype(np.int64)", "(zigzag & np.uint64(1)).astype(np.int64)", _WIRE),
    _fault("columns may have bytes to spare", "codec", "    if taken != len(raw):\n        raise", "    if taken > len(raw):\n        raise", (_T.format("responder"), _T.format("codec"))),
    _fault("ranges may overlap", "codec", "    if not fine.all():\n", "    if not fine.any():\n", (_T.format("responder"),)),
    _fault("splits need not ascend", "codec", "    if not above.all():\n", "    if not len(above):\n", (_T.format("responder"),)),
    _fault("parts need not add up", "codec", "if (part_counts < 1).any() or (np.add.reduceat(part_counts, firsts) != counts).any():", "if (part_counts < 1).any():", (_T.format("responder"),)),
    _fault("parts may be empty", "codec", "if (part_counts < 1).any() or ", "if ", (_T.format("responder"),)),
    _fault("no answer is progress", "codec", "if not 0 < answered <= len(ranges):", "if not answered <= len(ranges):", _LIARS),
    _fault("any frame is long enough", "responder", "    if room < FRAME_BYTES_MIN:\n", "    if room < 0:\n", (_T.format("responder"),)),
    _fault("the frame limit is passed", "codec", "if size <= room or count == 1:", "if True:", (_T.format("filling"), _T.format("responder"))),
    _fault("a message that is too long is cut by number", "codec", 'min(count - 1, int(spent.searchsorted(affordable, side="right")))', "int(count * room / size * _SHRINK)", (_T.format("filling"),)),
    # Budgets
    _fault("depth has no limit", "learning", "if int(depths.max()) > self._depth_max:", "if False:", _LIARS),
    _fault("bytes have no limit", "limits", "if self.bytes > bytes_max:", "if False:", _LIARS),
    _fault("requests have no limit", "limits", "if self.requests > limits.requests_max:", "if False:", _LIARS),
    _fault("time has no limit", "limits", "if elapsed_s > seconds_max:", "if False:", _LIARS),
    _fault("a list that is refused is asked for again and again", "learning", "self._out.list_cap = max(cap, SMALL_COUNT)", "pass", (_T.format("responder"), *_SYNC)),
    _fault("an answer beyond the budget is read", "initiator", "            self._budget.check(len(self._view), elapsed_s)\n            events = self._take(flying, response)\n", "            events = self._take(flying, response)\n            self._budget.check(len(self._view), elapsed_s)\n", (_T.format("learning"),)),
    _fault("an ended session goes on", "initiator", "        flying = self._landed(request_id)\n        if self._over:\n", "        flying = self._landed(request_id)\n        if False:\n", (_T.format("learning"),)),
    _fault("each part that we lack is a need", "learning", "        ranges, counts = join_ranges", "        join_ranges", (_T.format("learning"),)),
    _fault("needs join across what we hold", "worklist", "_group_starts(ranges.touches_next(), counts, cap)", "_group_starts(np.ones(len(ranges) - 1, bool), counts, cap)", (_T.format("learning"),)),
    _fault("claimed counts make columns", "codec", "table(message.hashes, SUMMARY_HASH_BYTES, int(sizes.sum()))", "table(message.hashes, SUMMARY_HASH_BYTES, len(implied_counts(counts, sizes, phase)))", (_T.format("codec"),)),
    _fault("runs are read however many", "codec", "    if count > ranges_max:\n", "    if False:\n", (_T.format("codec"),)),
    # Keys
    _fault("one nonce is enough for a key", "session", "material = initiator_nonce + responder_nonce + interest_digest", "material = initiator_nonce + initiator_nonce + interest_digest", _KEYS),
    _fault("a nonce lives for ever", "session", "for e in (epoch, max(epoch - 1, 0))", "for e in range(epoch + 1)", _KEYS),
    _fault("the order is not hashed", "hashing", "        right[:, 0] ^= orders\n", "", _KEYS),
    _fault("half of the id is not hashed", "hashing", "        right ^= words[:, 2:]\n", "", _KEYS),
    _fault("the key is not used", "hashing", "algorithms.AES(key.raw)", "algorithms.AES(bytes(16))", _KEYS),
    # Index and views
    _fault("duplicates in a batch are kept", "index", "new = ~_repeats(orders, heads, ids)", "new = np.ones(len(orders), bool)", _INDEX),
    _fault("duplicates of older runs are kept", "index", "            new &= ~self._stored(run, places, orders, ids, heads)\n", "            pass\n", _INDEX),
    _fault("duplicates among the waiting are kept", "index", "if element not in self._pending and not", "if not", _INDEX),
    _fault("inseparable duplicates are kept", "index", "            places[candidates] += 1\n", "            break\n", _INDEX),
    _fault("merging puts the younger first", "store", "target = places + np.arange(len(younger))", "target = np.arange(len(younger))", _INDEX),
    _fault("ties are not searched by head", "store", "        if len(inside):\n", "        if False:\n", _INDEX),
    _fault("long columns are searched one short", "store", "below &= further <= len(self)", "below &= further < len(self)", _INDEX),
    _fault("a window is closed above", "view", "return wanted if upper is None else wanted & (orders < np.uint64(upper))", "return wanted if upper is None else wanted & (orders <= np.uint64(upper))", _INDEX),
    _fault("views of groups do not grow", "view", "mine &= np.isin(news.groups, self._wanted)", "mine &= False", _INDEX),
    _fault("the tail is forgotten in the total", "view", "low, high = self._tail_sums\n        for run", "low, high = 0, 0\n        for run", _INDEX),
    _fault("the cache grows for ever", "view", "total > self._bytes_max", "False", _INDEX),
    _fault("segments of rows are seen half merged", "index", "            new, segments = _merged(segments[-1], new), segments[:-1]\n", "            new, segments = _merged(segments[-1], new), segments[:-1]\n            self._segments = (*self._segments, new)\n", (_T.format("index"),)),
    _fault("rows that came later are in an older snapshot", "index", "return rows[rows < stop] if covered > stop else rows", "return rows", (_T.format("index"),)),
    # Fetching
    _fault("anything that arrives is accepted", "fetch", "at = at if inside and (some is None or name in some) else _NOWHERE", "pass", (_T.format("fetch"),)),
    _fault("short ids are not compared", "fetch", "at = at if inside and (some is None or name in some) else _NOWHERE", "at = at if inside else _NOWHERE", (_T.format("fetch"),)),
    _fault("a cut answer need not progress", "fetch", "if not batch or self._barren_left < 0 or bound <= batch[0].range.lower:", "if not batch:", (_T.format("fetch"),)),
    _fault("what was cut off is not asked for again", "fetch", "        for need in reversed(left):\n", "        for need in left[:0]:\n", (_T.format("fetch"), *_SYNC)),
    _fault("answers that bring nothing are forgiven for ever", "fetch", "self._barren_left -= is_barren", "pass", (_T.format("fetch"),)),
    _fault("elements of an answer need not ascend", "fetch", "after < before for before", "False for before", (_T.format("fetch"),)),
    _fault("an element may come twice", "fetch", "if len(set(zip(orders.tolist(), map(bytes, ids), strict=True))) < len(ids):", "if False:", (_T.format("fetch"),)),
    _fault("elements may lie above the resume bound", "fetch", "keys[-1] > _bound_of(resume)", "False", (_T.format("fetch"),)),
    _fault("names that were never served are forgotten", "fetch", "self._owed_names |= set(", "set().union(", (_T.format("fetch"),)),
    _fault("what came is asked for again", "fetch", "    missing = [name not in brought", "    missing = [True", (_T.format("fetch"),)),
    _fault("content costs nothing", "initiator", "        self._budget.bytes += content_call_bytes\n        self._budget.check(len(self._view), elapsed_s)\n", "        pass\n", (_T.format("fetch"),)),
    _fault("a fetch may look at everything", "fetch", "if reached == len(wanted.ranges):", "if True:", (_T.format("fetch"),)),
    _fault("a cut fetch skips a range", "fetch", "wanted.ranges[reached].lower", "wanted.ranges[reached].upper", (_T.format("fetch"),)),
    _fault("whole ranges are not brought", "fetch", "    asked |= wanted.counts[owner] == 0\n", "", (_T.format("fetch"),)),
    _fault("all ranges are answered however many", "responder", "first = slice(limits.ranges_answered_max)", "first = slice(None)", (_T.format("responder"),)),
    # Proofs
    _fault("equal ranges need no equal total", "initiator", "if compares_all and not any(answers.kinds) and theirs != self._total:", "if False:", (_T.format("proof"),)),
    _fault("a total may be absent", "codec", 'if not response.HasField("total") or len(total.sum) != SUM_BYTES or ', "if ", (_T.format("proof"),)),
    _fault("any total agrees", "initiator", "return Stated(theirs.count, theirs == self._total)", "return Stated(theirs.count, True)", (_T.format("transcript"),)),
    _fault("a total has one lane", "view", "sums = count + sign * len(columns), (sums[0] + low, sums[1] + high)", "sums = count + sign * len(columns), (sums[0] + low, sums[1])", (_T.format("proof"),)),
    _fault("a root forgets the policy", "hashing", 'material += policy.to_bytes(4, "little")', "material += bytes(4)", (_T.format("proof"),)),
    # Elements set aside
    _fault("elements set aside are offered", "learning", "            rows = rows[~is_aside]\n", "", (_T.format("aside"),)),
    _fault("elements set aside are not added", "view", "            self._push(self._keyed(added.orders[sequence], rows))\n", "            pass\n", (_T.format("proof"),)),
    _fault("elements set aside are not removed", "view", "        kept[places[same]] = False\n", "        pass\n", (_T.format("proof"),)),
    _fault("an element of the same order is removed instead", "view", "same = (self._snapshot.ids_of(run.rows_at(places)) == removed.ids[there]).all(axis=1)", "same = np.ones(len(places), bool)", (_T.format("aside"),)),
    _fault("elements set aside are forgotten when a view grows", "view", "self._index.state.snapshot.beside(self._snapshot.aside)", "self._index.state.snapshot", (_T.format("aside"),)),
    _fault("nobody is told what the peer has no more", "learning", "self._out.events.append(NotThere(", "list((", (_T.format("aside"),)),
    _fault("a node does not know its own nonces", "session", "return hmac.compare_digest(nonce, initiator_nonce(node_secret, nonce[:half]))", "return False", _KEYS),
    _fault("a cut between runs takes the first", "fetch", "        if total > count - count // _CLOSE:\n", "        if total:\n", (_T.format("fetch"),)),
    _fault("a root forgets the count", "hashing", 'material = count.to_bytes(8, "little")', "material = bytes(8)", (_T.format("proof"),)),
    _fault("a prefix covers whatever sorts above it", "session", "return at > 0 and name.startswith(prefixes[at - 1])", "return at > 0", _KEYS),
    # Disk
    _fault("a checkpoint is not verified", "checkpoint", "!= digest:\n        return None", "== b'':\n        return None", _DISK),
]  # fmt: skip
