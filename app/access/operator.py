"""The operator of a node: whoever can read the file `operator.token` in its data directory.

An address never makes an operator, because a proxy on this machine makes every caller look local. `serve`
makes a new token at each start, and keeps the data directory locked (`node.lock`) while it runs: a second
service would share its secrets. The lock file also says where the node listens. So the command line can send
the token to that node and to nothing else: while the lock is held, nobody else can listen on the address, and
after it was let go, the token is worth nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from app.server.disk import kept_once, replace_file

OPERATOR_ID = "operator"
OPERATOR_FILE = "operator.token"
LOCK_FILE = "node.lock"

LOCK_WAIT_S = 2.0
"""A command that looks at the lock holds it for microseconds, and a node that stops for moments."""

_TOKEN = re.compile(r"sds_operator_[0-9a-f]{64}")
_LOOK_S = 0.02
_Address = tuple[IPv4Address | IPv6Address, int]


class InUseError(Exception):
    """Another service uses the data directory; the text names it."""


# --- in the node -----------------------------------------------------------------------------------


def operator_token(data_dir: Path) -> str:
    """The operator's token of a data directory, made if there is none; empty if that fails."""
    path = data_dir / OPERATOR_FILE
    text = ""
    with suppress(OSError):
        text = _read_token(path)
        if text:
            return text
        path.unlink(missing_ok=True)
        kept_once(path, _new_token())
        text = _read_token(path)
    return text


def _new_token() -> bytes:
    return f"sds_{OPERATOR_ID}_{secrets.token_hex(32)}\n".encode()


def _read_token(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return text if _TOKEN.fullmatch(text) else ""


def has_token(data_dir: Path) -> bool:
    """Whether a data directory has an operator's token that this user can read."""
    try:
        return bool(_read_token(data_dir / OPERATOR_FILE))
    except OSError:
        return False


@contextmanager
def locked(data_dir: Path) -> Iterator[int]:
    """Use a data directory alone while the block runs, with a new operator's token; gives the lock.

    Raises InUseError, OSError.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(data_dir / LOCK_FILE, flags, 0o600)
    try:
        _take(lock, data_dir)
        os.truncate(lock, 0)
        token = data_dir / OPERATOR_FILE
        with suppress(OSError):  # a new file would take over who can read the one it replaces
            if token.lstat().st_mode != stat.S_IFREG | 0o600:
                token.unlink()
        with suppress(OSError):  # on a full disk, which can be read from, the old token stays
            replace_file(token, _new_token())
        yield lock
    finally:
        os.close(lock)


def _take(lock: int, data_dir: Path) -> None:
    ends_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                other = _document(lock)
                who = f"process {other.get('pid')} at {other.get('url')}" if other else "a service"
                detail = f"{who} uses the data directory {data_dir}; choose another --data-dir"
                raise InUseError(detail) from None
            time.sleep(_LOOK_S)
        else:
            return


@contextmanager
def announced(lock: int, data_dir: Path, listener: socket.socket, url: str) -> Iterator[None]:
    """Let this user's commands find the node while the block runs, which ends before the listener closes.

    Where that fails, as without a home directory, they need `--token-file`.
    """
    host, port = listener.getsockname()[:2]
    document = {"pid": os.getpid(), "url": url, "address": host, "port": port, "place": _place()}
    link = _links() / f"{host}_{port}"
    with suppress(OSError):
        os.pwrite(lock, json.dumps(document).encode(), 0)
    with suppress(OSError):
        _links().mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in _links().iterdir():  # those of nodes that were killed
            if not _held(each):
                each.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(data_dir.resolve())
    try:
        yield
    finally:
        with suppress(OSError):
            os.truncate(lock, 0)
            link.unlink(missing_ok=True)


# --- in the command line ---------------------------------------------------------------------------


def token_for(url: str) -> str | None:
    """The operator's token of the node at a loopback URL, if this user can read it; else None.

    It is looked for in `SDSTORE_DATA_DIR` or `./data`, as `serve` does, and where the user's running nodes
    have left word.
    """
    address = _loopback(url)
    if address is None:
        return None
    host, port = address
    every = "0.0.0.0" if host.version == 4 else "::"  # noqa: S104 - a node that listens everywhere
    links = [_links() / f"{each}_{port}" for each in (host, every)]
    for data_dir in (Path(os.environ.get("SDSTORE_DATA_DIR") or "data"), *links):
        if _serves(data_dir, address):
            with suppress(OSError):
                return _read_token(data_dir / OPERATOR_FILE) or None
    return None


def _loopback(url: str) -> _Address | None:
    """The loopback address of a URL that no proxy handles; None for host names and other addresses."""
    parts = urlsplit(url)
    try:
        host = ip_address(parts.hostname or "")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    proxies = getproxies()
    is_proxied = parts.scheme in proxies or "all" in proxies
    # NO_PROXY can name the port too.
    is_direct = proxy_bypass(str(host)) or proxy_bypass(f"{host}:{port}")
    if not host.is_loopback or (is_proxied and not is_direct):
        return None
    return host, port


def _serves(data_dir: Path, address: _Address) -> bool:
    """Whether the node of a data directory runs, here, and listens on an address."""
    document = _held(data_dir)
    try:
        bound = ip_address(document["address"])
        is_bound = bound == address[0] or (
            bound.is_unspecified and bound.version == address[0].version
        )
        return is_bound and document["port"] == address[1] and document["place"] == _place()
    except (KeyError, ValueError):
        return False


def _held(data_dir: Path) -> dict[str, Any]:
    """What the lock file of a data directory says; empty if no service holds it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(data_dir / LOCK_FILE, flags)
    except OSError:
        return {}
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _document(lock)
    except OSError:
        return {}
    finally:
        os.close(lock)
    return {}


def _document(lock: int) -> dict[str, Any]:
    try:
        document = json.loads(os.pread(lock, 4_096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _place() -> str:
    """This host and network namespace: the same address in another one leads elsewhere."""
    try:
        namespace = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        namespace = ""  # not Linux
    return f"{socket.gethostname()} {namespace}"


def _links() -> Path:
    """The folder of links, named ADDRESS_PORT, to the data directories of a user's running nodes."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:  # a user without a home directory
        state = Path(os.devnull)
    return state / "sdstore" / "nodes"
