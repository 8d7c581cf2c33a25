"""HTML of the page: templates, and how untrusted text, times, sizes, bars and plots are shown.

Everything that messages, channels and peers say is untrusted. Templates escape it, and `shown` writes
control characters and invisible ones, those that reorder text among them, as their code points.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from app.access.callers import Rate, Scope
from app.access.operator import OPERATOR_ID
from app.errors import Code, Problem
from app.http.call import AsgiScope, Call, Headers, Reply, rfc3339
from app.server.node import Node

FOLDER = Path(__file__).parent
FILES = {
    "page.css": b"text/css; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}

PAGE_HEADERS: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    # Not no-referrer: with that, browsers send `Origin: null` for the forms of this page.
    (b"referrer-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
]

NAME_CHARACTERS = 80
"""Characters of an ID or a channel in a list; its own page has it whole."""

BAR_WIDTH = 1_000
PLOT_WIDTH, PLOT_HEIGHT = 600, 80

_HEIGHTS = {"in_sync": 24, "syncing": 16, "dont_have": 6}
"""Of the states in a range bar: they differ in height, not only in colour."""

_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\U000e0000-\U000e0fff"
)
"""Characters that are not seen or change how others are seen; a line feed and a tab are seen in content."""

_OF_NAMES = re.compile(f"[{_HIDDEN}\t\n]+")
_OF_CONTENT = re.compile(f"[{_HIDDEN}]+")


def shown(text: str, most: int = NAME_CHARACTERS, *, is_content: bool = False) -> Markup:
    """Untrusted text: escaped, isolated, cut after `most` characters, hidden characters as code points."""
    pattern = _OF_CONTENT if is_content else _OF_NAMES
    cut, parts, start = text[:most], [], 0
    for found in pattern.finditer(cut):
        codes = " ".join(f"U+{ord(each):04X}" for each in found[0])
        parts += [
            escape(cut[start : found.start()]),
            Markup('<span class="code">%s</span>') % codes,
        ]
        start = found.end()
    parts.append(escape(cut[start:]))
    more = Markup('<span class="more">…</span>') if len(text) > most else ""
    return Markup("<bdi>%s%s</bdi>") % (Markup("").join(parts), more)


def number(value: float) -> str:
    """With thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1_024:
            return f"{count:.0f}\u202f{unit}" if unit == "B" else f"{count:.1f}\u202f{unit}"
        count /= 1_024
    return f"{count:.1f}\u202fTiB"


def span(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f}\u202f{name}"
    return f"{seconds:.0f}\u202fs" if seconds >= 10 else f"{seconds:.1f}\u202fs"


def moment(epoch_ms: float | None) -> Markup:
    """A time in UTC; a dash for none."""
    if epoch_ms is None:
        return Markup("–")
    text = rfc3339(int(epoch_ms))
    return Markup('<time datetime="%s">%s</time>') % (text, text[:19].replace("T", " "))


def day(epoch_s: float) -> str:
    """A day in UTC."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d")


def bar(segments: Sequence[Mapping[str, Any]]) -> Markup:
    """The rectangles of a range bar: neighbours of one state are one."""
    joined: list[tuple[str, float]] = []
    for each in segments:
        state, share = str(each["state"]), float(each["share"])
        if joined and joined[-1][0] == state:
            share += joined.pop()[1]
        joined.append((state, share))
    left, shapes = 0.0, []
    for state, share in joined:
        height, width = _HEIGHTS.get(state, 6), share * BAR_WIDTH
        shapes.append(
            Markup('<rect class="%s" x="%.1f" y="%d" width="%.1f" height="%d"/>')
            % (state, left, 24 - height, width, height)
        )
        left += width
    return Markup("").join(shapes)


def curve(points: Sequence[tuple[float, float]]) -> Markup:
    """The path of a line through points (x, y), ascending, that fills a plot; empty for fewer than two."""
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return Markup("")
    (x0, y0), (x1, y1) = points[0], points[-1]
    steps = [
        f"{(x - x0) / (x1 - x0) * PLOT_WIDTH:.1f} "
        f"{PLOT_HEIGHT - (y - y0) / ((y1 - y0) or 1) * (PLOT_HEIGHT - 2) - 1:.1f}"
        for x, y in points
    ]
    return Markup("M%s") % " L".join(steps)


def link(path: str, **query: str | None) -> str:
    """A URL below the page, percent-encoded; parameters that are None are left out."""
    given = [f"{name}={quote(each, safe='')}" for name, each in query.items() if each is not None]
    return f"{path}?{'&'.join(given)}" if given else path


@cache
def _environment() -> Environment:
    # The templates of a running process do not change.
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    filters = (shown, number, size, span, moment, day, bar, curve)
    environment.filters.update({each.__name__: each for each in filters})
    environment.globals.update(
        link=link,
        version=version("sdstore"),
        files={
            name: sha256((FOLDER / "files" / name).read_bytes()).hexdigest()[:16] for name in FILES
        },
        plot=(PLOT_WIDTH, PLOT_HEIGHT),
        bar_width=BAR_WIDTH,
    )
    return environment


def part(template: str, **values: Any) -> str:
    """A part of a page."""
    return _environment().get_template(template).render(values)


def page(call: Call, template: str, status: int = 200, **values: Any) -> Reply:
    """A whole page."""
    caller = call.caller
    known = {
        "caller": caller.name,
        "is_operator": caller.may(Scope.ADMIN),
        "is_reader": caller.may(Scope.READ),
        "is_signed_in": caller.token_id is not None or caller.name == OPERATOR_ID,
        "is_anonymous": caller.rate is Rate.ANONYMOUS,
    }
    return _whole(call.asgi, call.node, template, status, [], {**known, **values})


def problem_page(asgi: AsgiScope, node: Node, problem: Problem, headers: Headers) -> Reply:
    """The page of a refusal; one that lacks a token asks for it."""
    shown_as = "sign_in.html" if problem.code is Code.UNAUTHENTICATED else "problem.html"
    nobody = {
        "caller": "",
        "is_operator": False,
        "is_reader": False,
        "is_signed_in": False,
        "is_anonymous": True,
    }
    told = [(name.lower().encode(), each.encode()) for name, each in problem.headers.items()]
    # The page signs in with a form: browsers have no dialogue for `Bearer`.
    told = [each for each in told if each[0] != b"www-authenticate"]
    document = problem.document()
    values = {**nobody, "problem": document}
    return _whole(asgi, node, shown_as, problem.status, [*told, *headers], values)


def _whole(
    asgi: AsgiScope,
    node: Node,
    template: str,
    status: int,
    headers: Headers,
    values: Mapping[str, Any],
) -> Reply:
    # Links are relative, so that the page works below any prefix of a proxy.
    depth = asgi["path"].removeprefix(asgi.get("root_path", "")).count("/") - 1
    known = {"home": "../" * depth or "./", "to": "../" * depth + "page/", "node_id": node.node_id}
    text = part(template, **known, **values)
    return Reply(status, [*PAGE_HEADERS, *headers], text.encode("utf-8", "replace"))
