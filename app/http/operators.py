"""Routes for operators: access tokens, settings, the quarantine, retiring, retention.

`app.access.tokens` keeps the tokens, and `sdstore token` changes the same file. `app.server.node` reads the
settings again. What the policy kept apart is listed, shown, released or dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator

from app.access.callers import Scope, SenderGrant
from app.access.tokens import HOLDS_AFTER_S, NAMES_MAX
from app.errors import Code, Problem, SettingsError
from app.hexadecimal import hex_bytes
from app.http.admission import NodeRoute, Operator, json_body
from app.http.call import Reply, json_only, rfc3339
from app.http.federation import utf8_text
from app.http.openapi import (
    HeldMessage,
    HeldPage,
    NewToken,
    Released,
    Reloaded,
    RetentionDryRun,
    RetentionRules,
    RetiredEntries,
    RetiredState,
    TokenList,
    body,
    content,
    documented,
    reply,
)
from app.ingest.quarantine import Held
from app.live.hub import Notice
from app.server.limits import DEFAULT_LIMITS
from app.server.node import reload_settings
from app.server.settings import RETENTION_RULES_MAX, RetentionRule
from app.server.workers import WorkerPlace
from sdstore.sds.codec import to_json

# ---- access tokens

tokens_router = APIRouter(tags=["tokens"], route_class=NodeRoute)

_Text = Annotated[str, AfterValidator(utf8_text)]
_Names = Annotated[list[_Text], FailFast()]


class SenderBody(BaseModel):
    """A sender that a token is bound to, and in which channels; `*` at the end of either: all that begin so."""

    model_config = ConfigDict(extra="forbid")

    sender: _Text
    channels: _Text = "*"


class TokenBody(BaseModel):
    """A token to make. Without channels and prefixes it covers every channel."""

    model_config = ConfigDict(extra="forbid")

    name: _Text = ""
    scopes: list[Scope] = Field(min_length=1, max_length=len(Scope))
    channels: _Names = Field(default_factory=list, max_length=NAMES_MAX)
    channel_prefixes: _Names = Field(default_factory=list, max_length=NAMES_MAX)
    expires_in_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    senders: list[SenderBody] = Field(default_factory=list, max_length=NAMES_MAX)
    vouches: bool = Field(False, description="can bring messages of any sender: a peer, a bridge")


@tokens_router.get("/v1/tokens", **documented({200: reply("The tokens", TokenList)}))
async def list_tokens(call: Operator) -> Reply:
    """All access tokens, without their secrets."""
    tokens = await asyncio.to_thread(call.node.access.tokens.file.read)
    return json_only({"tokens": [each.document() for each in tokens]})


@tokens_router.post(
    "/v1/tokens", **documented({201: reply("Made", NewToken)}, body(content(TokenBody)))
)
async def create_token(call: Operator, body: Annotated[TokenBody, json_body(TokenBody)]) -> Reply:
    """Make an access token. Its text is in this reply only."""
    token, text = await asyncio.to_thread(
        call.node.access.tokens.file.create,
        name=body.name,
        scopes=body.scopes,
        channels=body.channels,
        prefixes=body.channel_prefixes,
        expires_in_s=body.expires_in_s,
        senders=[SenderGrant(each.sender, each.channels) for each in body.senders],
        vouches=body.vouches,
    )
    call.target = token.token_id
    headers = [(b"cache-control", b"no-store")]
    return json_only(token.document() | {"token": text}, 201, headers)


@tokens_router.delete("/v1/tokens/{token_id:segment}", **documented({204: reply("Revoked")}))
async def revoke_token(call: Operator, token_id: str) -> Reply:
    """Revoke an access token. The reply comes when no worker accepts it any more."""
    await asyncio.to_thread(call.node.access.tokens.file.revoke, token_id)
    await asyncio.sleep(HOLDS_AFTER_S)
    return Reply(204, [])


# ---- settings

settings_router = APIRouter(tags=["settings"], route_class=NodeRoute)

WORKERS_WAIT_S = 10.0
"""How long the call waits for the other workers. They need milliseconds, unless one hangs or its settings
became invalid at this moment."""
_LOOK_S = 0.01


@settings_router.post("/v1/reload", **documented({200: reply("Taken over", Reloaded)}))
async def reload(call: Operator) -> Reply:
    """Read the settings again: `changed` names those that were taken over, `needs_restart` the others.

    The reply comes when every worker of this service has taken them over.
    """
    try:
        found = reload_settings(call.node)
    except SettingsError as error:
        raise Problem(Code.INVALID_SETTING, str(error)) from None
    if call.node.worker is not None:
        await _all_reloaded(call.node.worker)
    return json_only({"changed": found.changed, "needs_restart": found.needs_restart})


async def _all_reloaded(worker: WorkerPlace) -> None:
    """Have all workers reload, and wait for it. Raises Problem: `not_ready`."""
    mark = worker.board.reload(worker.number)
    ends_s = time.monotonic() + WORKERS_WAIT_S
    while behind := worker.board.behind(mark):
        if time.monotonic() > ends_s:
            numbers = ", ".join(map(str, behind))
            detail = f"no new settings after {WORKERS_WAIT_S:g} s in workers {numbers}; see the log"
            raise Problem(Code.NOT_READY, detail)
        await asyncio.sleep(_LOOK_S)


# ---- the quarantine

quarantine_router = APIRouter(tags=["quarantine"], route_class=NodeRoute)

_log = logging.getLogger(__name__)

DIGEST_BYTES = 32

_Limit = Annotated[int, Query(ge=1, le=DEFAULT_LIMITS.page_items_max)]
_AfterNumber = Annotated[int, Query(ge=0, le=2**63 - 1, description="the `next` of the last page")]


@quarantine_router.get(
    "/v1/quarantine", **documented({200: reply("A page of the quarantine", HeldPage)})
)
async def list_quarantine(
    call: Operator, after: _AfterNumber = 0, limit: _Limit = DEFAULT_LIMITS.page_items_default
) -> Reply:
    """Messages in the quarantine, oldest first, without their content."""
    held = await asyncio.to_thread(call.node.ingest.quarantine.page, after, limit)
    following = held[-1].number if len(held) == limit else None
    return json_only({"messages": [_document(each) for each in held], "next": following})


@quarantine_router.get(
    "/v1/quarantine/{digest:segment}", **documented({200: reply("The message", HeldMessage)})
)
async def show_quarantined(call: Operator, digest: str) -> Reply:
    """One message in the quarantine, with its content."""
    entry = await asyncio.to_thread(
        call.node.ingest.quarantine.entry, hex_bytes(digest, "a digest")
    )
    return json_only({"digest": entry.digest.hex(), "message": to_json(entry.message)})


@quarantine_router.post(
    "/v1/quarantine/{digest:segment}/release", **documented({200: reply("Released", Released)})
)
async def release_quarantined(call: Operator, digest: str) -> Reply:
    """Store a message, as if it came now; the policy does not see it again."""
    quarantine = call.node.ingest.quarantine
    async with quarantine.deciding():
        entry = await asyncio.to_thread(quarantine.entry, hex_bytes(digest, "a digest"))
        outcome = await call.node.ingest.door.release(entry)
        message = entry.message
        notice = Notice("released", message.channel_id, message.message_id, entry.digest)
        call.node.live.hub.tell(notice)
        await asyncio.to_thread(quarantine.forget, entry.digest)
    _log.info("%s released message %s", call.caller.name, entry.digest.hex())
    return json_only({"digest": entry.digest.hex(), "outcome": outcome.kind})


@quarantine_router.delete("/v1/quarantine/{digest:segment}", **documented({204: reply("Dropped")}))
async def drop_quarantined(call: Operator, digest: str) -> Reply:
    """Delete a message; it is refused from now on."""
    quarantine = call.node.ingest.quarantine
    async with quarantine.deciding():
        await asyncio.to_thread(quarantine.drop, hex_bytes(digest, "a digest"))
    _log.info("%s dropped message %s", call.caller.name, digest.lower())
    return Reply(204, [])


# ---- retiring

retirements_router = APIRouter(tags=["retirements"], route_class=NodeRoute)


class RetireBody(BaseModel):
    """Entries to retire: all under an ID, in every channel or in one; or one, by its digest.

    `with_history`: the IDs of its causes go too.
    """

    model_config = ConfigDict(extra="forbid")

    message_id: _Text | None = None
    channel_id: _Text | None = None
    digest: str | None = None
    reason: _Text = Field(min_length=1)
    with_history: bool = False

    @model_validator(mode="after")
    def _names_one(self) -> RetireBody:
        if (self.message_id is None) == (self.digest is None):
            raise ValueError("give either message_id or digest")
        if self.digest is not None and self.channel_id is not None:
            raise ValueError("a digest names one entry: leave channel_id out")
        return self


@retirements_router.get(
    "/v1/retirements", **documented({200: reply("The state of retired entries", RetiredState)})
)
async def show_retirements(call: Operator) -> Reply:
    """How many entries are retired, and whether their content is erased."""
    count = await call.node.store.frames.retired_count()
    return json_only({"retired": count, "erasure": call.node.ingest.retirement.erasure})


@retirements_router.post(
    "/v1/retirements",
    **documented({200: reply("Retired", RetiredEntries)}, body(content(RetireBody))),
)
async def retire(call: Operator, body: Annotated[RetireBody, json_body(RetireBody)]) -> Reply:
    """Drop the content of entries for good; they stay elements of the set. Repeating it changes nothing."""
    most = call.node.limits.retire_reason_bytes_max
    if len(body.reason.encode()) > most:
        raise Problem(Code.INVALID_PARAMETER, f"the reason has more than {most} bytes")
    retirement = call.node.ingest.retirement
    if body.digest is not None:
        digest = hex_bytes(body.digest, "the digest")
        if len(digest) != DIGEST_BYTES:
            raise Problem(Code.INVALID_HEX, "a digest has 32 bytes, 64 hexadecimal digits")
        done = await retirement.retire([digest], body.reason, with_history=body.with_history)
        call.target = body.digest
    else:
        message_id = body.message_id or ""
        done = await retirement.retire_id(
            message_id, body.channel_id, body.reason, with_history=body.with_history
        )
        call.target = message_id
    _log.info("%s retired %r: %s", call.caller.name, call.target, body.reason)
    return json_only({**done.counts._asdict(), "erasure": done.erasure})


class DryRunBody(BaseModel):
    """Rules to try, those in force if there are none; `after`: the `next` of the last reply."""

    model_config = ConfigDict(extra="forbid")

    rules: list[RetentionRule] | None = Field(None, max_length=RETENTION_RULES_MAX)
    after: int = Field(0, ge=0, lt=2**63)


@retirements_router.get(
    "/v1/retention", **documented({200: reply("The rules in force", RetentionRules)})
)
async def show_retention(call: Operator) -> Reply:
    """What this node keeps of its channels. The setting `retention` has the rules."""
    return json_only({"rules": [each.model_dump() for each in call.node.ingest.retention.rules]})


@retirements_router.post(
    "/v1/retention/dry-run",
    **documented({200: reply("A part of it", RetentionDryRun)}, body(content(DryRunBody))),
)
async def try_retention(
    call: Operator, body: Annotated[DryRunBody, json_body(DryRunBody)]
) -> Reply:
    """What rules would retire now, of some channels at a time; nothing changes."""
    retention = call.node.ingest.retention
    rules = retention.rules if body.rules is None else body.rules
    found, following = await retention.would_retire(rules, body.after)
    channels = [
        {
            "rule": each.rule,
            "channel_id": each.channel_id,
            "bound": each.bound,
            "entries": each.entries,
            "bytes": each.bytes,
            "oldest_at": rfc3339(each.oldest_ms),
            "newest_at": rfc3339(each.newest_ms),
        }
        for each in found
    ]
    return json_only({"channels": channels, "next": following})


def _document(held: Held) -> dict[str, object]:
    return {
        "digest": held.digest.hex(),
        "message_id": held.message_id,
        "channel_id": held.channel_id,
        "frame_bytes": held.frame_bytes,
        "way": held.way,
        "reason": held.reason,
        "held_at": rfc3339(held.held_at_ms),
    }
