"""Faults planted in the store."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHAIN = ("tests/app/store/test_arrivals.py",)


def _fault(name: str, module: str, right: str, wrong: str, tests: tuple[str, ...]) -> Fault:
    return Fault(f"store: {name}", f"app/store/{module}.py", right, wrong, tests)


FAULTS = [
    # The arrival chain
    _fault("the sum of a token is not compared", "elementreads", "is_same = (entry_sum, claim_sum) == (entries.sum, claims.sum)", "is_same = True", (*_CHAIN, "tests/app/federation/test_back_in_time.py")),
    _fault("a token above the watermark holds", "elementreads", "is_there = entries.number <= seq and claims.number <= claim_no", "is_there = True", _CHAIN),
    _fault("numbers are given again after the newest row is gone", "writestatements", "                watermark.c.seq,\n", "                highest(messages.c.seq),\n", _CHAIN),
    _fault("numbers of claims are given again", "writestatements", "                watermark.c.claim_no,\n", "                highest(published_claims.c.claim_no),\n", _CHAIN),
    _fault("order does not matter", "arrivals", "        blocks[:, 0] = numbers\n", "", _CHAIN),
    _fault("a group begins its sums anew", "groupwriter", "self._chain.sums(before.sum, seqs, digests)", "self._chain.sums(0, seqs, digests)", _CHAIN),
]  # fmt: skip
