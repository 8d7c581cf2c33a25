"""The file of the access tokens, and the tokens as a process knows them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from app.access import tokens as module
from app.access.callers import Caller, Scope
from app.access.tokens import NAMES_MAX, TokenFile, Tokens
from app.errors import Code, Problem
from app.server.supervisor import Supervisor


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


def bearer(text: str) -> bytes:
    return b"Bearer " + text.encode()


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def refusal(tokens: Tokens, authorization: bytes) -> Code:
    with pytest.raises(Problem) as caught:
        tokens.caller(authorization)
    return caught.value.code


def test_a_token_gives_its_grants_and_the_file_has_no_secret(file: TokenFile) -> None:
    token, text = file.create(
        name="phone", scopes=[Scope.READ, Scope.PUBLISH], channels=["a", ""], prefixes=["/b/"]
    )
    caller = Tokens(file).caller(bearer(text))
    assert caller.name == f"token {token.token_id}"
    assert caller.scopes == {Scope.READ, Scope.PUBLISH}
    assert [caller.covers(each) for each in ("a", "", "/b/", "/b/1", "ab", "/b")] == [
        *[True] * 4,
        *[False] * 2,
    ]
    secret = text.split("_")[2]
    assert secret not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_file_that_another_user_changes_keeps_its_owner_and_mode(tmp_path: Path) -> None:
    # Only root can give files away. The node's user is `nobody` then, and root makes and revokes tokens.
    owner = 65534 if os.geteuid() == 0 else os.getuid()
    os.chown(tmp_path, owner, -1)
    file = TokenFile(tmp_path / "tokens.json")
    first, _ = file.create(scopes=["read"])
    assert (file.path.stat().st_uid, stat.S_IMODE(file.path.stat().st_mode)) == (owner, 0o600)
    file.path.chmod(0o640)
    file.create(scopes=["read"])
    file.revoke(first.token_id)
    assert (file.path.stat().st_uid, stat.S_IMODE(file.path.stat().st_mode)) == (owner, 0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["tokens.json"], "no file of another user"


def test_a_file_whose_owner_cannot_be_kept_is_not_replaced(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.create(scopes=["read"])
    before = file.path.read_bytes()
    made = os.fstat

    def of_another(descriptor: int) -> os.stat_result:
        fields = list(made(descriptor))
        fields[4] += 1  # st_uid
        return os.stat_result(fields)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("app.server.disk.os.fstat", of_another)
    monkeypatch.setattr("app.server.disk.os.fchown", refuse)
    with pytest.raises(Problem, match="not permitted") as caught:
        file.create(scopes=["read"])
    assert caught.value.code is Code.TOKENS_UNAVAILABLE
    assert file.path.read_bytes() == before


def test_a_token_without_channels_covers_every_channel(file: TokenFile) -> None:
    _, text = file.create(scopes=[Scope.ADMIN])
    Tokens(file).caller(bearer(text)).require(Scope.ADMIN, "any")


@pytest.mark.parametrize(
    "made",
    [
        {"scopes": []},
        {"scopes": [Scope.READ, "reed"]},
        {"scopes": [Scope.OPEN]},
        {"scopes": [Scope.ADMIN], "channels": ["a"]},
        {"scopes": [Scope.READ], "prefixes": [""]},
        {"scopes": [Scope.READ], "channels": ["a" * 257]},
        {"scopes": [Scope.READ], "expires_in_s": 0},
        {"scopes": [Scope.READ], "expires_in_s": float("nan")},
        {"scopes": [Scope.READ], "channels": [str(n) for n in range(NAMES_MAX + 1)]},
    ],
)
def test_a_token_that_makes_no_sense_is_refused(file: TokenFile, made: dict[str, Any]) -> None:
    with pytest.raises(Problem) as caught:
        file.create(**made)
    assert caught.value.code in {Code.INVALID_PARAMETER, Code.TOO_MANY_ITEMS}
    assert not file.path.exists()


def test_whatever_is_wrong_with_a_token_has_one_answer(file: TokenFile) -> None:
    token, text = file.create(scopes=[Scope.READ])
    other, _ = file.create(scopes=[Scope.READ])
    secret = text.split("_")[2]
    tokens = Tokens(file)
    for wrong in (
        bearer(f"sds_{token.token_id}_{secret[:-1]}x"),
        bearer(f"sds_{other.token_id}_{secret}"),
        bearer(f"sds_000000000000_{secret}"),
        bearer(text.replace("_", "-")),
        bearer(""),
        b"Basic " + text.encode(),
        bearer("sds_\xff_\xff"),
        b"\xff\x00",
    ):
        assert refusal(tokens, wrong) is Code.UNAUTHENTICATED
    tokens.caller(b"bearer  " + text.encode())


@pytest.mark.anyio
async def test_an_expired_token_is_refused(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, text = file.create(scopes=[Scope.READ], expires_in_s=10)
    tokens = Tokens(file)
    caller = tokens.caller(bearer(text))
    assert token.expires_at_ms is not None
    monkeypatch.setattr(module, "_now_ms", lambda: token.expires_at_ms)
    assert refusal(tokens, bearer(text)) is Code.UNAUTHENTICATED
    with pytest.raises(Problem):
        tokens.begin(caller, this_task())


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "tokens": []}',
        b'{"version": 1, "tokens": [{}]}',
        b'{"version": 1, "tokens": "none"}',
        b"\xff" * 100,
        None,
    ],
)
def test_where_the_file_cannot_be_read_every_token_is_refused_until_it_can(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    _, text = file.create(scopes=[Scope.READ])
    whole = file.path.read_bytes()
    tokens = Tokens(file)
    tokens.caller(bearer(text))
    monkeypatch.setattr(module, "LOOK_S", -1.0)
    file.path.unlink()
    if damage is None:
        file.path.mkdir()
    else:
        file.path.write_bytes(damage)
    assert refusal(tokens, bearer(text)) is Code.TOKENS_UNAVAILABLE
    with pytest.raises(Problem) as caught:
        file.create(scopes=[Scope.READ])
    assert caught.value.code is Code.TOKENS_UNAVAILABLE
    if damage is None:
        file.path.rmdir()
    else:
        assert file.path.read_bytes() == damage  # a file that cannot be read is not replaced
    file.path.write_bytes(whole)
    tokens.caller(bearer(text))


def test_a_limit_of_another_type_is_damage_and_never_another_grant(file: TokenFile) -> None:
    file.create(scopes=[Scope.READ], channels=["abc"])
    row = json.loads(file.path.read_bytes())["tokens"][0]
    for wrong in ({"channels": "abc"}, {"channels": None}, {"channel_prefixes": [1]}):
        document = {"version": 1, "tokens": [row | wrong]}
        file.path.write_text(json.dumps(document))
        with pytest.raises(Problem) as caught:
            file.read()
        assert caught.value.code is Code.TOKENS_UNAVAILABLE


def test_a_change_that_cannot_be_written_changes_nothing_and_leaves_nothing(
    file: TokenFile,
) -> None:
    file.create(scopes=[Scope.READ])
    before, names = file.path.read_bytes(), set(file.path.parent.iterdir())
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, allowed[1]))  # as a disk that gets full
    try:
        with pytest.raises(Problem) as caught:
            file.create(scopes=[Scope.READ])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert caught.value.code is Code.TOKENS_UNAVAILABLE
    assert (file.path.read_bytes(), set(file.path.parent.iterdir())) == (before, names)
    file.create(scopes=[Scope.READ])


def test_changes_by_several_processes_at_once_are_all_kept(file: TokenFile) -> None:
    threads = [
        threading.Thread(target=lambda: [file.create(scopes=[Scope.READ]) for _ in range(10)])
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len({each.token_id for each in file.read()}) == 40


@pytest.mark.anyio
async def test_a_revocation_and_a_change_of_grants_end_what_runs(file: TokenFile) -> None:
    tokens = Tokens(file)

    async def run(caller: Caller) -> None:
        tokens.begin(caller, this_task())
        try:
            await asyncio.sleep(30)
        finally:
            tokens.end(this_task())

    async with tokens.watched(Supervisor()):
        made = [file.create(scopes=[Scope.READ], name=str(n)) for n in range(3)]
        callers = [tokens.caller(bearer(text)) for _, text in made]
        tasks = [asyncio.create_task(run(each)) for each in callers]
        await asyncio.sleep(0)
        file.revoke(made[0][0].token_id)
        rows = json.loads(file.path.read_bytes())
        rows["tokens"][0]["scopes"] = ["publish"]
        file.path.write_text(json.dumps(rows))
        await asyncio.wait_for(asyncio.gather(*tasks[:2], return_exceptions=True), 2)
        assert [each.done() for each in tasks] == [True, True, False]
        with pytest.raises(Problem):
            tokens.begin(callers[1], this_task())
        tokens.begin(callers[2], this_task())
        tokens.end(this_task())
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not tokens._running


def test_what_was_verified_is_bounded_and_ends_with_the_grants_and_the_token(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERIFIED_MAX", 8)
    token, text = file.create(scopes=[Scope.READ], expires_in_s=1_000)
    tokens = Tokens(file)
    for spaces in range(1, 50):  # each is another spelling of the same credentials
        assert tokens.caller(b"Bearer" + b" " * spaces + text.encode()).name.endswith(
            token.token_id
        )
        assert refusal(tokens, bearer(f"{text}{spaces}")) is Code.UNAUTHENTICATED
        assert len(tokens._verified) <= 8
    monkeypatch.setattr(module, "_now_ms", lambda: token.created_at_ms + 1_000_000)
    assert refusal(tokens, bearer(text)) is Code.UNAUTHENTICATED
    monkeypatch.undo()
    assert tokens.caller(bearer(text)).scopes == {Scope.READ}
    rows = json.loads(file.path.read_bytes())
    rows["tokens"][0]["scopes"] = ["publish"]
    file.path.write_text(json.dumps(rows))
    tokens.look()
    assert tokens.caller(bearer(text)).scopes == {Scope.PUBLISH}
    file.revoke(token.token_id)
    tokens.look()
    assert refusal(tokens, bearer(text)) is Code.UNAUTHENTICATED
