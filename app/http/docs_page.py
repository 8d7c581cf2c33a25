"""The OpenAPI document as one HTML page: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h3 code { font-size: 1.05rem; } dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; } section { border-top: 1px solid #8886; } :root { color-scheme: light dark; }
"""


def render_docs(document: dict[str, Any]) -> str:
    """Every operation with its parameters, bodies and answers."""
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>For programs: <a href="/openapi.json">openapi.json</a>. '
        f"Errors are problem documents (RFC 9457) with a stable <code>code</code>.</p>{operations}"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    about = operation.get("description") or operation.get("summary", "")
    parameters = [
        (f"{p['name']} ({p['in']})", p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    answers = [(status, a.get("description", "")) for status, a in operation["responses"].items()]
    return (
        f"<section><h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(about)}</p>"
        f"{_list('Parameters', parameters)}{_list('Body', [(kind, '') for kind in body])}"
        f"{_list('Answers', answers)}</section>"
    )


def _list(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    items = "".join(f"<dt><code>{escape(a)}</code><dd>{escape(b)}" for a, b in rows)
    return f"<h4>{title}</h4><dl>{items}</dl>"
