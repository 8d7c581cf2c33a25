"""Every code that one request can produce is produced by a command for a shell."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.access.operator import token_for
from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from tests.support.server import RunningNode, running_node

# A command for a shell, by the code that it produces on a node with default limits.
LINES = {
    Code.MALFORMED_FRAME: r"""printf '\377' | curl -s -H "$PB" --data-binary @- $NODE/v1/messages""",
    Code.MISSING_MESSAGE_ID: """curl -s -H "$JSON" -d '{"message":{"channel_id":"c","lamport_timestamp":"1","content":"aGk="}}' $NODE/v1/messages""",
    Code.INVALID_UTF8: r"""printf '\022\001\377\032\001c\120\001\242\001\001x' | curl -s -H "$PB" --data-binary @- $NODE/v1/messages""",
    Code.NUL_CHARACTER: r"""curl -s -H "$JSON" -d '{"message":{"message_id":"a\u0000b","channel_id":"c","content":"aGk="}}' $NODE/v1/messages""",
    Code.LAMPORT_OUT_OF_RANGE: """curl -s -H "$JSON" -d '{"message":{"message_id":"m","channel_id":"c","lamport_timestamp":"9223372036854775808","content":"aGk="}}' $NODE/v1/messages""",
    Code.NO_CONTENT_NO_LAMPORT: """curl -s -H "$JSON" -d '{"message":{"message_id":"m","channel_id":"c"}}' $NODE/v1/messages""",
    Code.INVALID_JSON_MESSAGE: """curl -s -H "$JSON" -d '{"message":{"no_such_field":1}}' $NODE/v1/messages""",
    Code.FRAME_TOO_LARGE: """(printf '{"message":{"message_id":"m","channel_id":"c","lamport_timestamp":"1","content":"'; head -c 1100000 /dev/zero | base64 -w0; printf '"}}') | curl -s -H "$JSON" --data-binary @- $NODE/v1/messages""",
    Code.MESSAGE_ID_TOO_LONG: r"""curl -s -H "$JSON" -d '{"message":{"message_id":"'$(head -c 1025 /dev/zero | tr '\0' m)'","channel_id":"c","lamport_timestamp":"1","content":"aGk="}}' $NODE/v1/messages""",
    Code.CHANNEL_ID_TOO_LONG: r"""curl -s -H "$JSON" -d '{"message":{"message_id":"m","channel_id":"'$(head -c 257 /dev/zero | tr '\0' c)'","lamport_timestamp":"1","content":"aGk="}}' $NODE/v1/messages""",
    Code.SENDER_ID_TOO_LONG: r"""curl -s -H "$JSON" -d '{"message":{"message_id":"m","channel_id":"c","sender_id":"'$(head -c 1025 /dev/zero | tr '\0' s)'","lamport_timestamp":"1","content":"aGk="}}' $NODE/v1/messages""",
    Code.HISTORY_TOO_LONG: """curl -s -H "$JSON" -d '{"message":{"message_id":"m","channel_id":"c","lamport_timestamp":"1","content":"aGk=","causal_history":['$(seq -s, -f '{"message_id":"%g"}' 257)']}}' $NODE/v1/messages""",
    Code.HINT_TOO_LONG: r"""curl -s -H "$JSON" -H "Retrieval-Hint: $(head -c 514 /dev/zero | tr '\0' a)" -d '{"message":{"message_id":"m","channel_id":"c","lamport_timestamp":"1","content":"aGk="}}' $NODE/v1/messages""",
    Code.TOO_MANY_HINTS: """curl -s -H "$JSON" -H "Retrieval-Hint: $(seq -s, 10 26)" -d '{"message":{"message_id":"m","channel_id":"c","lamport_timestamp":"1","content":"aGk="}}' $NODE/v1/messages""",
    Code.BLOOM_FILTER_TOO_LARGE: """(printf '{"message":{"message_id":"m","channel_id":"c","lamport_timestamp":"1","content":"aGk=","bloom_filter":"'; head -c 65537 /dev/zero | base64 -w0; printf '"}}') | curl -s -H "$JSON" --data-binary @- $NODE/v1/messages""",
    Code.INVALID_PARAMETER: 'curl -s "$NODE/v1/feed?limit=0"',
    Code.INVALID_BODY: r"""printf '\377' | curl -s -H "$PB" --data-binary @- $NODE/v1/messages/batch""",
    Code.INVALID_HEX: "curl -s $NODE/v1/hints/xyz",
    Code.INVALID_CURSOR: 'curl -s "$NODE/v1/feed?after=abc"',
    Code.FOREIGN_CURSOR: 'curl -s "$NODE/v1/feed?after=uedoeXbqHP4jRogKZXJ4gHUYBPjo8t3ROSZHNjd4RAe600L8A7fmX8er6g"',
    Code.MALFORMED_REQUEST: "curl -s -X 'BAD METHOD' $NODE/v1/feed",
    Code.HEADERS_TOO_LARGE: r"""curl -s -H "x-filler: $(head -c 100000 /dev/zero | tr '\0' x)" $NODE/v1/feed""",
    Code.EMPTY_BODY: 'curl -s -H "$PB" -X POST $NODE/v1/messages',
    Code.BODY_TOO_LARGE: 'head -c 3000000 /dev/zero | curl -s -H "$PB" --data-binary @- $NODE/v1/messages',
    Code.TOO_MANY_ITEMS: "yes '{}' | head -10001 | curl -s -H 'content-type: application/x-ndjson' --data-binary @- $NODE/v1/messages/batch",
    Code.UNSUPPORTED_MEDIA_TYPE: "curl -s -H 'content-type: text/plain' -d hello $NODE/v1/messages",
    Code.NOT_ACCEPTABLE: "curl -s -H 'accept: text/html' $NODE/v1/channels",
    Code.NOT_FOUND: "curl -s $NODE/v1/messages/no-such-message",
    Code.NO_SUCH_ROUTE: "curl -s $NODE/v2/messages",
    Code.METHOD_NOT_ALLOWED: "curl -s -X PATCH $NODE/v1/feed",
    Code.REQUEST_TIMEOUT: 'sleep 40 | curl -s -H "$PB" -X POST -T - $NODE/v1/messages',
    Code.UNAUTHENTICATED: "curl -s -H 'authorization: Bearer none' $NODE/v1/info",
    Code.FORBIDDEN: "curl -s -H 'host: store.example' $NODE/v1/info",
    Code.INVALID_RECON_REQUEST: r"""printf '\377' | curl -s -H "$PB" --data-binary @- $NODE/v1/recon""",
    Code.INVALID_NEGENTROPY_MESSAGE: r'''printf '\141\377' | curl -s -H 'content-type: application/octet-stream' --data-binary @- "$NODE/v1/negentropy?channel_id=c"''',
    Code.PEER_URL_REFUSED: """curl -s -H "$OPERATOR" -H "$JSON" -d '{"url":"ftp://store.example"}' $NODE/v1/peers""",
    Code.PEER_UNREACHABLE: """curl -s -H "$OPERATOR" -H "$JSON" -d '{"peer_url":"http://store.invalid"}' $NODE/v1/syncs""",
}
# Codes that no single request answers with: they depend on the address, other requests, or the node's
# state, or are the outcome of an item alone.
NOT_BY_ONE_REQUEST = {
    Code.INVALID_SETTING,
    Code.TOKENS_UNAVAILABLE,
    Code.RATE_LIMITED,
    Code.POLICY_REFUSED,
    Code.SENDER_NOT_YOURS,
    Code.QUARANTINED,
    Code.WITHHELD,
    Code.REFUSED,
    Code.POLICY_FAILED,
    Code.CURSOR_ROLLED_BACK,
    Code.CURSOR_REWOUND,
    Code.ORDER_TOO_LARGE,
    Code.ORDER_BUDGET_SPENT,
    Code.RECON_BUDGET_SPENT,
    Code.PEER_MISBEHAVED,
    Code.PEER_VERSION,
    Code.SYNC_BUSY,
    Code.NOT_RELAYED,
    Code.OVERLOADED,
    Code.NOT_READY,
    Code.DISK_FULL,
    Code.STORE_UNAVAILABLE,
    Code.CONTENT_LOST,
    Code.RETIRED,
    Code.INTERNAL_ERROR,
}
BODY_TIMEOUT_S = 1


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    limits = replace(DEFAULT_LIMITS, body_read_timeout_s=BODY_TIMEOUT_S)
    with running_node(tmp_path_factory.mktemp("node"), limits) as running:
        yield running


def test_every_code_that_one_request_produces_has_a_line() -> None:
    assert set(LINES) == set(Code) - NOT_BY_ONE_REQUEST


@pytest.mark.parametrize("code", sorted(LINES))
def test_the_line_gives_the_code(node: RunningNode, code: Code) -> None:
    line = LINES[code].replace("sleep 40", f"sleep {BODY_TIMEOUT_S + 1}")
    environment = {
        "NODE": node.url,
        "OPERATOR": f"authorization: Bearer {token_for(node.url)}",
        "JSON": "content-type: application/json",
        "PB": "content-type: application/x-protobuf",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }
    status_line = line.replace("curl -s", "curl -s -w '\\n%{http_code} %{content_type}'")
    ran = subprocess.run(
        ["sh", "-c", status_line], env=environment, capture_output=True, timeout=30, check=False
    )
    body, _, status = ran.stdout.decode().rpartition("\n")
    document = json.loads(body)
    expected = Problem(Code(code), "")
    assert status == f"{expected.status} application/problem+json", document
    assert document["code"] == code, document
    assert document["status"] == expected.status
    assert document["title"] == expected.title
    assert document["type"] == f"urn:sdstore:problem:{code}"
    assert document["detail"]
