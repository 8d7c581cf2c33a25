"""Verbs of operators: token, quarantine, retire, retention, interests, reload."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from string import hexdigits
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.main import loading
from app.cli.messages import hex_argument
from app.cli.output import (
    DEFAULT_NODE,
    AsJson,
    CliError,
    ConfigFile,
    DataDir,
    Exit,
    NodeUrl,
    counted,
    human_bytes,
    node_client,
    print_json,
    print_note,
    print_table,
    stdout,
    table,
    time_text,
)
from app.errors import Code, Problem
from app.server.logs import printable
from app.server.settings import load_settings

if TYPE_CHECKING:
    from types import ModuleType

    from app.access.tokens import Token, TokenFile
    from sdstore.client import StoreClient


# ---- access tokens

verbs = typer.Typer()
token = typer.Typer(help="Make, list and revoke the access tokens of a node.")
verbs.add_typer(token, name="token")

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")


@token.command()
def new(
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="read, publish, sync or admin; may be repeated."),
    ],
    name: Annotated[str, typer.Option("--name", help="What it is for, for people.")] = "",
    channel: Annotated[
        list[str] | None,
        typer.Option("--channel", metavar="C", help="Only this channel; may be repeated."),
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix", metavar="P", help="Only channels that begin with P; may be repeated."
        ),
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", metavar="TIME", help="For example 12h or 90d; unset: never."),
    ] = None,
    sender: Annotated[
        list[str] | None,
        typer.Option(
            "--sender",
            metavar="S",
            help="Bound to this sender ID, or to all that begin with it (S*); may be repeated.",
        ),
    ] = None,
    sender_channel: Annotated[
        list[str] | None,
        typer.Option(
            "--sender-channel",
            metavar="C",
            help="Bound to its senders in this channel, or in all that begin with it (C*), only; may be repeated.",
        ),
    ] = None,
    vouches: Annotated[
        bool,
        typer.Option("--vouches", help="Can bring messages of any sender: for peers and bridges."),
    ] = False,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it; it is shown once."""
    bound = [(each, where) for each in sender or () for where in sender_channel or ["*"]]
    file = _file(data_dir, config)
    expires_in_s = None if expires_in is None else _seconds(expires_in)
    try:
        made, text = file.create(
            name=name,
            scopes=scope,
            channels=channel or (),
            prefixes=prefix or (),
            expires_in_s=expires_in_s,
            senders=[_library().SenderGrant(*each) for each in bound],
            vouches=vouches,
        )
    except Problem as problem:
        if problem.code is not Code.INVALID_PARAMETER:
            raise
        raise CliError(Exit.USAGE, problem.code, problem.detail) from None
    if as_json:
        print_json(made.document() | {"token": text})
        return
    sys.stdout.write(f"{text}\n")
    print_note(f"token {made.token_id}: {_grants(made)}")


@token.command("list")
def list_tokens(
    data_dir: DataDir = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """List the tokens, without their secrets."""
    file = _file(data_dir, config)
    found = file.read()
    if as_json:
        for each in found:
            print_json(each.document())
    elif found:
        rows = [
            (
                each.token_id,
                each.name,
                _scopes(each),
                _channels(each),
                _senders_of(each),
                time_text(each.expires_at_ms),
            )
            for each in found
        ]
        print_table(
            table(
                "ID", "name", "scopes", "channels", "senders", "expires", rows=rows, whole=("ID",)
            )
        )
    else:
        print_note(f"no tokens in {file.path}")


@token.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The ID of the token.")],
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token; it holds when the command ends."""
    revoked = _file(data_dir, config).revoke(token_id)
    sleep(_library().HOLDS_AFTER_S)
    if as_json:
        print_json({"revoked": revoked.token_id})
    else:
        stdout().print(f"revoked token {revoked.token_id}", markup=False)


def _library() -> ModuleType:
    """`app.access.tokens`, which brings numpy: the help of all verbs does without."""
    with loading():
        from app.access import tokens  # noqa: PLC0415

    return tokens


def _file(data_dir: Path | None, config: Path | None) -> TokenFile:
    settings, _ = load_settings(config, {"data_dir": data_dir})
    tokens = _library()
    file: TokenFile = tokens.TokenFile(tokens.tokens_path(settings))
    return file


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        detail = f"--expires-in {text!r} is not a number with s, m, h or d, such as 90d"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    return int(found[1]) * _UNITS_S[found[2]]


def _grants(made: Token) -> str:
    senders = f"; writes as {found}" if (found := _senders_of(made)) else ""
    expires = time_text(made.expires_at_ms)
    return f"{_scopes(made)}; {_channels(made)}{senders}; expires {expires}"


def _senders_of(made: Token) -> str:
    if made.vouches:
        return "any sender"
    return ", ".join(
        each.sender if each.channels == "*" else f"{each.sender} in {each.channels}"
        for each in made.senders
    )


def _scopes(made: Token) -> str:
    return ", ".join(made.document()["scopes"])


def _channels(made: Token) -> str:
    if made.channels is None:
        return "every channel"
    return ", ".join([*made.channels.channels, *(f"{each}*" for each in made.channels.prefixes)])


# ---- the quarantine

quarantine = typer.Typer(help="List, release and drop the messages in the quarantine of a node.")
verbs.add_typer(quarantine, name="quarantine")

Digest = Annotated[
    str, typer.Argument(metavar="DIGEST", help="The digest of the message, or how it begins.")
]

_DIGITS = 64
SHOWN = 16
"""Digits of a digest in the table: all 64 would take most of a terminal. 10,000 digests do not share so many."""


@quarantine.command("list")
def list_held(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """List the messages, oldest first."""
    with node_client(node) as client:
        found = list(client.quarantine())
    if as_json:
        for each in found:
            print_json(each)
    elif found:
        rows = [
            (
                *(each["digest"][:SHOWN], each["message_id"], each["channel_id"], each["way"]),
                *(human_bytes(each["frame_bytes"]), each["held_at"], each["reason"]),
            )
            for each in found
        ]
        headings = ("digest", "message", "channel", "way", "size", "held at", "reason")
        print_table(table(*headings, rows=rows, whole=("digest",)))
    else:
        print_note("the quarantine is empty")


@quarantine.command()
def release(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Store a message; the policy does not see it again."""
    with node_client(node) as client:
        released = client.release_quarantined(_whole(client, digest))
    if as_json:
        print_json(released)
    else:
        stdout().print(f"released {released['digest']}: {released['outcome']}", markup=False)


@quarantine.command()
def drop(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Delete a message, and refuse it from now on."""
    with node_client(node) as client:
        dropped = _whole(client, digest)
        client.drop_quarantined(dropped)
    if as_json:
        print_json({"dropped": dropped.hex()})
    else:
        stdout().print(f"dropped {dropped.hex()}", markup=False)


def _whole(client: StoreClient, digest: str) -> bytes:
    """The digest that begins like this. A whole one need not be in the quarantine."""
    if len(digest) >= _DIGITS or not set(digest) <= set(hexdigits):
        return hex_argument(digest, "DIGEST")
    if len(digest) < SHOWN:
        detail = f"{digest!r} is too short: give {SHOWN} digits of the digest at least"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    found = [each["digest"] for each in client.quarantine()]
    matching = [each for each in found if each.startswith(digest.lower())]
    if len(matching) != 1:
        detail = f"{len(matching)} messages of the quarantine begin with {digest}"
        raise CliError(Exit.NO, "not_found", detail)
    return bytes.fromhex(matching[0])


# ---- retiring

ERASURE_WAIT_S = 10.0
"""How long the verb waits until the node's files are free of the content."""


@verbs.command()
def retire(
    message_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="All messages under this ID.")
    ] = None,
    digest: Annotated[
        str | None,
        typer.Option("--digest", metavar="HEX", help="This message, also before it arrives."),
    ] = None,
    channel: Annotated[
        str | None, typer.Option("--channel", metavar="C", help="Only in this channel.")
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept with the entry.")
    ] = "",
    with_history: Annotated[
        bool, typer.Option("--with-history", help="Drop the IDs of its causes, too.")
    ] = False,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Drop the content of messages for good.

    The node answers 410 for them from then on; they come back neither by publishing nor from a peer. Peers,
    participants, backups and snapshots that have a copy keep it.
    """
    if (message_id is None) == (digest is None):
        raise CliError(Exit.USAGE, "invalid_parameter", "give an ID or --digest, one of both")
    if not reason:
        raise CliError(Exit.USAGE, "invalid_parameter", "say why with --reason")
    with node_client(node) as client:
        found = client.retire(
            reason,
            message_id=message_id,
            channel_id=channel,
            digest=None if digest is None else hex_argument(digest, "--digest"),
            with_history=with_history,
        )
        until_s = monotonic() + ERASURE_WAIT_S
        while found["erasure"] == "pending" and monotonic() < until_s:
            sleep(0.2)
            found = {**found, "erasure": client.retirements()["erasure"]}
    if as_json:
        print_json(dict(found))
        return
    parts = [
        counted(found["retired"], "message", "messages") + " retired",
        *([f"{found['already']:,} retired before"] if found["already"] else []),
        *(["not here yet: stored without content on arrival"] if found["ahead"] else []),
    ]
    stdout().print("; ".join(parts), markup=False)
    print_note(_ERASURE[found["erasure"]])


@verbs.command()
def retention(
    dry_run: Annotated[
        Path | None,
        typer.Option(
            "--dry-run",
            metavar="FILE",
            help="Say what the rules of this settings file would retire.",
        ),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Show what a node keeps of its channels, or try other rules.

    The setting `retention` has the rules; a running node takes them over by `sdstore reload`.
    """
    with node_client(node) as client:
        if dry_run is None:
            rules = client.retention()["rules"]
            if as_json:
                print_json({"rules": rules})
            elif not rules:
                stdout().print("everything is kept")
            for place, each in enumerate([] if as_json else rules):
                stdout().print(f"{place}: {_rule_text(each)}", markup=False)
            return
        tried = load_settings(dry_run)[0].retention
        found = list(client.retention_dry_run([each.model_dump() for each in tried]))
    if as_json:
        print_json({"channels": found})
        return
    rows = [
        (
            *(str(each["rule"]), each["channel_id"], each["bound"], f"{each['entries']:,}"),
            *(human_bytes(each["bytes"]), each["oldest_at"], each["newest_at"]),
        )
        for each in found
    ]
    if rows:
        headings = ("rule", "channel", "beyond", "messages", "size", "oldest arrival", "newest")
        print_table(table(*headings, rows=rows, right=("rule", "messages", "size")))
    total = sum(each["entries"] for each in found)
    print_note(f"{counted(total, 'message', 'messages')} would be retired")


def _rule_text(rule: Mapping[str, Any]) -> str:
    """A rule for people."""
    names = [*rule["channels"], *[f"{prefix}*" for prefix in rule["channel_prefixes"]]]
    units = {"max_age_s": "s of age", "max_count": "messages", "max_bytes": "bytes"}
    bounds = [f"{rule[name]:,} {unit}" for name, unit in units.items() if rule[name] is not None]
    kept = f"at most {', '.join(bounds)}" if bounds else "everything"
    return printable(f"{', '.join(names) or 'every other channel'}: {kept}")


_ERASURE = {
    "done": "the files of the node's database no longer contain the content",
    "pending": "a reader still keeps the content in the node's files; the node tries again each second",
    "rewrite_needed": 'PostgreSQL keeps deleted rows: see "Erasure" in docs/operations.md',
}


# ---- interests and settings

interests = typer.Typer(help="Show and change which channels a running node syncs with its peers.")
verbs.add_typer(interests, name="interests")


@verbs.command()
def reload(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Have a node read its settings again.

    It applies what can change while it runs, and names the settings that need a restart.
    """
    with node_client(node) as client:
        found = client.reload()
    if as_json:
        print_json(dict(found))
        return
    stdout().print(f"changed: {', '.join(found['changed']) or 'nothing'}", markup=False)
    if found["needs_restart"]:
        print_note(f"not before a restart: {', '.join(found['needs_restart'])}")


@interests.command("list")
def show(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Show which channels a node syncs, and who set that."""
    with node_client(node) as client:
        _print(client.interests(), as_json=as_json)


@interests.command("set")
def set_(
    everything: Annotated[bool, typer.Option("--all", help="Every channel.")] = False,
    channel: Annotated[
        list[str] | None,
        typer.Option("--channel", metavar="C", help="This channel; may be repeated."),
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", metavar="P", help="Channels that begin with P; may be repeated."),
    ] = None,
    lamport_from: Annotated[
        int | None,
        typer.Option("--from-lamport", metavar="N", help="The lowest Lamport timestamp to sync."),
    ] = None,
    lamport_to: Annotated[
        int | None,
        typer.Option(
            "--to-lamport", metavar="N", help="The first Lamport timestamp above those to sync."
        ),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Change which channels a node syncs.

    The node keeps the change, which wins over the settings until `interests reset`.

    What the node lacks is fetched at once. What it holds outside the new interest stays readable,
    and is no longer synced.
    """
    if not (everything or channel or prefix):
        detail = "name --all, --channel or --prefix"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    if not all([*(channel or ()), *(prefix or ())]):
        # More likely a variable of a shell that is not set than the channel with the empty name.
        detail = "an empty name; every channel is --all"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    interest = {
        "all": everything,
        "channels": channel or [],
        "prefixes": prefix or [],
        "lamport_from": lamport_from,
        "lamport_to": lamport_to,
    }
    with node_client(node) as client:
        _print(client.set_interests(interest), as_json=as_json)


@interests.command()
def reset(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Return to the interest of the settings."""
    with node_client(node) as client:
        _print(client.reset_interests(), as_json=as_json)


def _print(document: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(dict(document))
        return
    console = stdout()
    if document["all"]:
        console.print("every channel")
    for name in document["channels"]:
        console.print(printable(name), markup=False)
    for prefix in document["prefixes"]:
        console.print(f"{printable(prefix)}*", markup=False)
    if not (document["all"] or document["channels"] or document["prefixes"]):
        console.print("no channel")
    low, high = document["lamport_from"], document["lamport_to"]
    if low is not None or high is not None:
        parts = [] if low is None else [f"from {low}"]
        parts += [] if high is None else [f"below {high}"]
        console.print(f"Lamport timestamps {' and '.join(parts)}")
    says = {"settings": "the settings say so", "operator": "an operator said so"}
    print_note(says.get(document["origin"], str(document["origin"])))
    outside = document.get("outside")
    if outside and outside["entries"]:
        entries = counted(outside["entries"], "entry", "entries")
        channels = counted(outside["channels"], "other channel", "other channels")
        print_note(f"{entries} outside, with {channels}, stay readable until retired; not synced")
