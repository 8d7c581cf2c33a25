"""Access tokens, for operators. `app.access.tokens` keeps them; `sdstore token` changes the same file."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from app.access.callers import Scope
from app.access.tokens import HOLDS_AFTER_S, NAMES_MAX
from app.http.admission import Operator, json_body
from app.http.call import Reply
from app.http.federation import utf8_text
from app.http.models import NewToken, TokenList
from app.http.openapi import body, content, documented, reply
from app.http.replies import json_only
from app.http.routing import NodeRoute

router = APIRouter(tags=["tokens"], route_class=NodeRoute)

_Text = Annotated[str, AfterValidator(utf8_text)]
_Names = Annotated[list[_Text], FailFast()]


class TokenBody(BaseModel):
    """A token to make. Without channels and prefixes it covers every channel."""

    model_config = ConfigDict(extra="forbid")

    name: _Text = ""
    scopes: list[Scope] = Field(min_length=1, max_length=len(Scope))
    channels: _Names = Field(default_factory=list, max_length=NAMES_MAX)
    channel_prefixes: _Names = Field(default_factory=list, max_length=NAMES_MAX)
    expires_in_s: float | None = Field(None, gt=0, allow_inf_nan=False)


@router.get("/v1/tokens", **documented({200: reply("The tokens", TokenList)}))
async def list_tokens(call: Operator) -> Reply:
    """All access tokens, without their secrets."""
    tokens = await asyncio.to_thread(call.node.tokens.file.read)
    return json_only({"tokens": [each.document() for each in tokens]})


@router.post("/v1/tokens", **documented({201: reply("Made", NewToken)}, body(content(TokenBody))))
async def create_token(call: Operator, body: Annotated[TokenBody, json_body(TokenBody)]) -> Reply:
    """Make an access token. Its text is in this reply only."""
    token, text = await asyncio.to_thread(
        call.node.tokens.file.create,
        name=body.name,
        scopes=body.scopes,
        channels=body.channels,
        prefixes=body.channel_prefixes,
        expires_in_s=body.expires_in_s,
    )
    call.target = token.token_id
    headers = [(b"cache-control", b"no-store")]
    return json_only(token.document() | {"token": text}, 201, headers)


@router.delete("/v1/tokens/{token_id:segment}", **documented({204: reply("Revoked")}))
async def revoke_token(call: Operator, token_id: str) -> Reply:
    """Revoke an access token. The reply comes when no worker accepts it any more."""
    await asyncio.to_thread(call.node.tokens.file.revoke, token_id)
    await asyncio.sleep(HOLDS_AFTER_S)
    return Reply(204, [])
