"""How the verbs reach a node: the access token to send, and the CAs of its certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.request import getproxies

import typer

from app.access.operator import token_for
from app.cli.output import CliError, Exit

TokenPath = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="SDSTORE_CLIENT_TOKEN_FILE",
        help="File with an access token, for verbs that call a node.",
    ),
]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        envvar="SDSTORE_CLIENT_CA_FILE",
        help="CA certificates of the node (PEM), for verbs that call one over https.",
    ),
]


@dataclass(slots=True)
class Access:
    """How the verbs of this command line reach a node: its token and the CAs of its certificate."""

    token_file: Path | None = None
    ca_file: Path | None = None

    def token(self, url: str) -> str | None:
        """The access token for a node: that of `--token-file`, or of a node of this user on this machine.

        Raises CliError.
        """
        self.check_proxies()
        return token_for(url) if self.token_file is None else read_token(self.token_file)

    def tls(self) -> ssl.SSLContext | None:
        """The context for https; None for the system's CAs. Raises CliError."""
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            detail = f"{self.ca_file}: {error.strerror or error}"
            raise CliError(Exit.LOCAL_FAULT, "cannot_read", detail) from None

    def check_proxies(self) -> None:
        """Raises CliError for a proxy of the environment that cannot be used; it can hold a password."""
        for name, url in getproxies().items():
            scheme, is_url, _ = url.partition("://")
            if name in {"http", "https", "all"} and is_url and scheme not in {"http", "https"}:
                detail = f"{name.upper()}_PROXY is a {scheme} proxy; use one of http or https, or unset it"
                raise CliError(Exit.USAGE, "invalid_parameter", detail)


access = Access()


def with_remedy(reason: str) -> str:
    """Why a node was not reached, with the option that mends it."""
    if "certificate is not trusted" not in reason:
        return reason
    return f"{reason}; if its CA is your own: sdstore --ca-file FILE VERB …"


def read_token(file: Path) -> str:
    """The token in a file. Raises CliError."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise CliError(Exit.LOCAL_FAULT, "cannot_read", detail) from None
    if not text or any(each.isspace() for each in text):
        raise CliError(Exit.USAGE, "invalid_parameter", f"{file} does not contain one token")
    return text
