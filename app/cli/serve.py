"""Verbs of the node as a program: serve, wait, openapi, version."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version as version_of
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Annotated

import typer

from app.access.operator import OPERATOR_FILE, InUseError, announced, has_token, locked
from app.cli.main import loading
from app.cli.output import (
    DEFAULT_NODE,
    AsJson,
    CliError,
    ConfigFile,
    DatabaseUrl,
    DataDir,
    Exit,
    NodeUrl,
    access,
    print_json,
    print_note,
    print_table,
    stdout,
    table,
    with_remedy,
)
from app.errors import SettingsError
from app.server.limits import limits_table
from app.server.settings import Settings, load_settings
from recon.limits import PROTOCOL_VERSION
from sdstore.sds.codec import DECODER_VERSION

verbs = typer.Typer()

TRUST = (
    "programs on this machine, and all callers of a proxy on it, can read, publish and sync without a token; "
    "set trust_loopback = false to require tokens"
)
_log = logging.getLogger(__name__)

_POLL_S = 0.1
_ANSWER_S_MAX = 5.0
"""A node that is ready answers at once; one that hangs is asked again."""


@verbs.command()
def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; 0 takes a free one.")
    ] = None,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="URL", help="A store to sync with; may be repeated."),
    ] = None,
    sync_interval: Annotated[
        float | None,
        typer.Option(
            "--sync-interval", metavar="S", help="Longest pause between syncs with a peer."
        ),
    ] = None,
    peer_token_file: Annotated[
        list[str] | None,
        typer.Option(
            "--peer-token-file",
            metavar="URL=FILE",
            help="File with the access token for a peer; may be repeated.",
        ),
    ] = None,
    peer_ca: Annotated[
        Path | None,
        typer.Option("--peer-ca", metavar="FILE", help="CA certificates of the peers (PEM)."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="This node's certificate and chain (PEM): serve https.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of --tls-cert (PEM).")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Number of processes; for PostgreSQL."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="A web origin whose pages may call the node; may be repeated; * is every page.",
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="URL by which callers reach the node through a proxy.",
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Address or network of a proxy that reports its callers; may be repeated.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow listening beyond this machine without credentials."),
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level", help="Least severe messages to log: debug, info, warning or error."
        ),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="Format of the log: text or json.")
    ] = None,
    until_eof: Annotated[
        bool,
        typer.Option("--until-eof", help="Stop when stdin ends."),
    ] = False,
    config: ConfigFile = None,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print each setting and where it comes from, and exit."),
    ] = False,
    show_limits: Annotated[
        bool, typer.Option("--show-limits", help="Print every bound of the node, and exit.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run a store node."""
    flags = {
        "host": host,
        "port": port,
        "database_url": database,
        "data_dir": data_dir,
        "peers": peer or None,
        "sync_interval_s": sync_interval,
        "peer_token_files": peer_token_file or None,
        "peer_ca": peer_ca,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "workers": workers,
        "cors_origins": cors_origin or None,
        "public_url": public_url,
        "trusted_proxies": trusted_proxy or None,
        "insecure": insecure or None,
        "log_level": log_level,
        "log_format": log_format,
    }
    settings, provenance = load_settings(config, flags)
    if show_limits:
        _show_limits(as_json)
    if show_config:
        _show_config(settings, provenance, as_json)
    if show_limits or show_config:
        return Exit.DONE
    _refuse_workers(settings, provenance)
    _refuse_exposure(settings)
    if settings.policy is not None:
        _check_policy(settings.policy)
    if settings.tls_cert is not None:
        _check_certificate(settings)
    if until_eof:
        # The program that started the node has gone, and with it any load balancer to drain for.
        settings = settings.model_copy(update={"drain_s": 0.0})
        Thread(target=_stop_at_eof, daemon=True).start()
    return _run(settings, as_json)


@verbs.command()
def wait(
    node: NodeUrl = DEFAULT_NODE,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0, help="Seconds to wait at most.")
    ] = 30,
    as_json: AsJson = False,
) -> None:
    """Wait until a node is ready, for example in a script that has just started it."""
    with loading():
        import httpx  # noqa: PLC0415 - a fifth of a second

        from sdstore.client.exchange import network_reason  # noqa: PLC0415

    access.check_proxies()
    started = monotonic()
    refusal = "no answer"
    with httpx.Client(base_url=node, timeout=_ANSWER_S_MAX, verify=access.tls() or True) as client:
        while True:
            try:
                answer = client.get("readyz")
                if answer.is_success:
                    _require_node(node, answer.content)
                    break
                refusal = f"/readyz answers {answer.status_code}"
            except httpx.HTTPError as error:
                refusal = with_remedy(network_reason(error))
            if monotonic() - started > timeout_s:
                detail = f"{node} is not ready after {timeout_s:g} s: {refusal}"
                raise CliError(Exit.LOCAL_FAULT, "timeout", detail)
            sleep(_POLL_S)
    waited_s = monotonic() - started
    if as_json:
        print_json({"url": node, "waited_s": round(waited_s, 3)})
    else:
        print_note(f"{node} is ready")


def _require_node(url: str, answer: bytes) -> None:
    """Raises CliError unless `answer` to /readyz is that of a node that is ready."""
    try:
        is_ready = json.loads(answer)["status"] == "ready"
    except (ValueError, TypeError, KeyError):
        is_ready = False
    if not is_ready:
        detail = f"{url} is not a node: its /readyz answers {answer[:60]!r}"
        raise CliError(Exit.PEER_FAULT, "malformed_reply", detail)


def _refuse_exposure(settings: Settings) -> None:
    """Raises CliError unless the operator means the node to be reachable by others."""
    if not (settings.is_loopback or settings.insecure or _has_tokens(settings)):
        raise CliError(
            Exit.REFUSED,
            "insecure_bind",
            f"others can reach {settings.host}, and no access token exists; make one with `sdstore token "
            "new`, listen on 127.0.0.1, or serve everybody with --insecure",
        )


def _refuse_workers(settings: Settings, provenance: dict[str, str]) -> None:
    """Raises SettingsError for several processes over SQLite, which one process writes and reads."""
    if settings.workers > 1 and settings.database_url.startswith("sqlite:"):
        raise SettingsError(
            f"workers ({provenance['workers']}): one process serves SQLite; for {settings.workers}, use "
            "PostgreSQL (--database postgresql://...), or leave workers at 1"
        )


def _check_policy(name: str) -> None:
    """Raises SettingsError here, and not in each worker, for a policy that cannot be loaded."""
    with loading():
        from app.ingest.policy import load_policy  # noqa: PLC0415 - brings code of the operator

    load_policy(name)


def _check_certificate(settings: Settings) -> None:
    """Raises SettingsError for a certificate that cannot be read: starting again does not mend it."""
    with loading():
        from app.server.node import checked_certificate  # noqa: PLC0415 - brings the store

    checked_certificate(settings)


def _has_tokens(settings: Settings) -> bool:
    with loading():
        from app.access.tokens import TokenFile, tokens_path  # noqa: PLC0415 - brings the store

    return bool(TokenFile(tokens_path(settings)).read())


def _run(settings: Settings, as_json: bool) -> int:
    # A second of imports.
    with loading():
        from app.cli.server import bind, run_node, run_workers, url_of  # noqa: PLC0415

    database = settings.shown_database_url

    def ready(node_id: str) -> None:
        if as_json:
            print_json({"url": url, "node_id": node_id, "database": database})
        else:
            console = stdout()
            console.print(f"[bold]sdstore[/] serves {url} (database {database})")
            console.print("Ctrl-C stops it", style="dim")
        sys.stdout.flush()
        if settings.trusts_loopback:
            _log.info(TRUST)
        if not has_token(settings.data_dir):
            file = settings.data_dir / OPERATOR_FILE
            _log.warning("no operator's token: %s cannot be written; remove what is there", file)

    with (
        _alone(settings.data_dir) as lock,
        bind(settings) as listener,
        announced(lock, settings.data_dir, listener, url := url_of(listener, settings)),
    ):
        if settings.workers > 1:
            return run_workers(settings, listener, ready)
        return run_node(settings, listener, lambda node: ready(node.node_id))


@contextmanager
def _alone(data_dir: Path) -> Iterator[int]:
    """The lock of the data directory. Raises CliError."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(data_dir))
        except InUseError as error:
            raise CliError(Exit.LOCAL_FAULT, "data_dir_in_use", str(error)) from None
        except OSError as error:
            detail = f"{data_dir}: {error.strerror or error}"
            raise CliError(Exit.LOCAL_FAULT, "io_error", detail) from None
        yield lock


def _stop_at_eof() -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _show_config(settings: Settings, provenance: dict[str, str], as_json: bool) -> None:
    values = settings.model_dump(mode="json") | {"database_url": settings.shown_database_url}
    if as_json:
        print_json({name: {"value": values[name], "from": provenance[name]} for name in values})
        return
    rows = [(name, _shown(values[name]), provenance[name]) for name in values]
    print_table(table("setting", "value", "from", rows=rows))


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _show_limits(as_json: bool) -> None:
    limits = limits_table()
    if as_json:
        print_json(
            {name: {"value": v, "unit": unit, "reason": why} for name, v, unit, why in limits}
        )
        return
    rows = [(name, f"{value:,}", unit, why) for name, value, unit, why in limits]
    print_table(table("limit", "value", "unit", "reason", rows=rows, right=["value"]))


@verbs.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of sdstore, the protocol, the decoder, Python and SQLite."""
    versions = {
        "sdstore": version_of("sdstore"),
        "recon_protocol": PROTOCOL_VERSION,
        "decoder": DECODER_VERSION,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    if as_json:
        print_json(versions)
        return
    name, number = next(iter(versions.items()))
    others = list(versions.items())[1:]
    details = ", ".join(f"{each.replace('_', ' ')} {value}" for each, value in others)
    stdout().print(f"[bold]{name}[/] {number} ({details})")


@verbs.command()
def openapi(as_json: AsJson = False) -> None:
    """Print the OpenAPI document of the HTTP interface; --json prints it on one line."""
    with loading():
        from app.http.application import openapi_document  # noqa: PLC0415 - a second of imports

    if as_json:
        print_json(openapi_document())
    else:
        sys.stdout.write(json.dumps(openapi_document(), indent=2, ensure_ascii=False) + "\n")
