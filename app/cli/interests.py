"""Verbs that change a running node: interests list, set, reset; reload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl, node_client
from app.cli.output import CliError, Exit, counted, print_json, print_note, stdout
from app.server.logs import printable

verbs = typer.Typer()
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
def list_(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
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
