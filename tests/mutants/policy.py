"""Faults planted in the operator's policy and in the quarantine."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing, returns

_TESTS = ("tests/app/test_policy.py",)


_RELOAD = "tests/app/http/test_reload.py"
_EDITED = "test_a_changed_file_of_a_policy_judges_from_the_reload_on_and_a_broken_one_does_not"


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"policy: {name}", seam, plant, _TESTS)


async def _accept_all(_: Any, checked: Any, *__: Any) -> Any:
    return list(checked)


def _accept_failures(_: Any) -> Any:
    def wrong(judge: Any, each: Any, way: Any) -> Any:
        from app.ingest.policy import ACCEPT

        return right(judge, each, way) or ACCEPT

    right = _
    return wrong


def _nothing_stored(right: Any) -> Any:
    async def nothing(_: Any) -> Any:
        return ()

    return lambda judge, checked, way, _: right(judge, checked, way, nothing)


def _without_claims(right: Any) -> Any:
    return lambda quarantine, digest: right(quarantine, digest)._replace(claims=())


def _leaves_the_failed(right: Any) -> Any:
    """Take the source for run before it is."""

    def wrong(name: str, source: Any) -> Any:
        sources = right.__globals__["_sources"]
        try:
            return right(name, source)
        except BaseException:
            sources[name] = source
            raise

    return wrong


def _by_colon(_: Any) -> Any:
    return lambda name: tuple(name.partition(":")[::2])


def _keep(quarantine: Any, digest: bytes) -> None:
    quarantine.entry(digest)


FAULTS = [
    Fault(
        "policy: a revision has no bound",
        "app.ingest.policy:REVISION_CHARACTERS_MAX",
        instead(1 << 30),
        _TESTS,
    ),
    Fault(
        "policy: a module that fails takes the place of the one that runs",
        "app.ingest.policy:_module",
        _leaves_the_failed,
        (f"{_RELOAD}::{_EDITED}",),
    ),
    Fault(
        "policy: a name of an entry point is a module",
        "app.ingest.policy:_place",
        _by_colon,
        _TESTS,
    ),
    _fault("everything is accepted", "app.ingest.policy:Judge.judge", instead(_accept_all)),
    _fault("a policy that fails accepts", "app.ingest.policy:Judge._verdict", _accept_failures),
    _fault("a failure is logged each time", "app.ingest.policy:LOG_AGAIN_S", instead(-1.0)),
    _fault("what is stored is judged again", "app.ingest.policy:Judge.judge", _nothing_stored),
    _fault("what is held is judged again", "app.ingest.quarantine:Quarantine.fates", returns({})),
    _fault(
        "hints of held messages are lost", "app.ingest.quarantine:Quarantine.entry", _without_claims
    ),
    _fault("a released message stays", "app.ingest.quarantine:Quarantine.forget", nothing),
    _fault("a dropped message stays", "app.ingest.quarantine:Quarantine.drop", instead(_keep)),
]
