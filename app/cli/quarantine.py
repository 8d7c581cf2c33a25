"""Verbs for messages that the policy of a node keeps apart: quarantine list, release, drop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.access import access
from app.cli.interrupts import loading
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl
from app.cli.output import (
    CliError,
    Exit,
    human_bytes,
    print_json,
    print_note,
    print_table,
    stdout,
    table,
)

if TYPE_CHECKING:
    import httpx

verbs = typer.Typer()
quarantine = typer.Typer(help="List, release and drop the messages in the quarantine of a node.")
verbs.add_typer(quarantine, name="quarantine")

Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="The digest of the message.")]

_ANSWER_S_MAX = 30.0


@quarantine.command("list")
def list_(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """List the messages, oldest first."""
    found: list[dict[str, Any]] = []
    with _client(node) as client:
        after: int | None = 0
        while after is not None:
            page = _called(client, "GET", f"v1/quarantine?after={after}&limit=1000")
            found += page["messages"]
            after = page["next"]
    if as_json:
        for each in found:
            print_json(each)
    elif found:
        rows = [
            (
                *(each["digest"], each["message_id"], each["channel_id"], each["way"]),
                *(human_bytes(each["frame_bytes"]), each["held_at"], each["reason"]),
            )
            for each in found
        ]
        print_table(
            table("digest", "message", "channel", "way", "size", "held at", "reason", rows=rows)
        )
    else:
        print_note("the quarantine is empty")


@quarantine.command()
def release(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Store a message; the policy does not see it again."""
    with _client(node) as client:
        released = _called(client, "POST", f"v1/quarantine/{_path(digest)}/release")
    if as_json:
        print_json(released)
    else:
        stdout().print(f"released {released['digest']}: {released['outcome']}", markup=False)


@quarantine.command()
def drop(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Delete a message, and refuse it from now on."""
    with _client(node) as client:
        _called(client, "DELETE", f"v1/quarantine/{_path(digest)}")
    if as_json:
        print_json({"dropped": digest.lower()})
    else:
        stdout().print(f"dropped {digest.lower()}", markup=False)


def _path(digest: str) -> str:
    if not digest.isalnum():
        raise CliError(Exit.USAGE, "invalid_parameter", f"{digest[:100]!r} is not a digest")
    return digest


@contextmanager
def _client(node: str) -> Iterator[httpx.Client]:
    with loading():
        import httpx  # noqa: PLC0415 - a fifth of a second

    token = access.token()
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    tls = access.tls() or True
    with httpx.Client(base_url=node, timeout=_ANSWER_S_MAX, verify=tls, headers=headers) as client:
        try:
            yield client
        except httpx.HTTPError as error:
            detail = f"{node}: {str(error) or type(error).__name__}"
            raise CliError(Exit.LOCAL_FAULT, "unreachable", detail) from None


def _called(client: httpx.Client, method: str, path: str) -> Any:
    """The document of a reply. Raises CliError for a problem document."""
    answer = client.request(method, path)
    if answer.status_code == 204:
        return None
    try:
        document = answer.json()
        if answer.is_success:
            return document
        code, detail = str(document["code"]), str(document["detail"])
    except (ValueError, TypeError, KeyError):
        detail = f"{client.base_url} is not a node: it answers {answer.content[:60]!r}"
        raise CliError(Exit.PEER_FAULT, "malformed_reply", detail) from None
    is_refusal = 400 <= answer.status_code < 500
    raise CliError(Exit.REFUSED if is_refusal else Exit.LOCAL_FAULT, code, detail)
