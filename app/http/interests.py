"""What this node wants of its peers: read by peers, changed by operators. `app.federation.interests` keeps it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictInt,
    model_validator,
)

from app.access.callers import Scope
from app.federation.interests import InterestState, described, interest_document, made_interest
from app.http.admission import Operator, admitted, json_body
from app.http.call import Call, Reply
from app.http.federation import utf8_text
from app.http.forms import Form
from app.http.models import ChangedInterest, InterestJson
from app.http.openapi import body, content, documented, reply
from app.http.recon import READS_ZSTD
from app.http.replies import json_only, json_reply, protobuf_reply
from app.http.routing import NodeRoute
from recon.limits import INTEREST_NAMES_MAX
from sdstore.client.transport import INSTANCE_HEADER

router = APIRouter(tags=["reconciliation"], route_class=NodeRoute)

STAYS = "entries outside the interest stay readable here until they are retired; no sync moves them"
"""What happens to the data that a narrower interest no longer covers."""

_Text = Annotated[str, AfterValidator(utf8_text)]
_Names = Annotated[list[_Text], FailFast()]
_Lamport = StrictInt | Annotated[str, Field(pattern=r"^-?[0-9]{1,19}$")]


class InterestBody(BaseModel):
    """All channels, or some by name and by prefix; of these the Lamport timestamps in a window.

    The window contains `lamport_from` and not `lamport_to`.
    """

    model_config = ConfigDict(extra="forbid")

    all: bool = False
    channels: _Names = Field(default_factory=list, max_length=INTEREST_NAMES_MAX)
    prefixes: _Names = Field(default_factory=list, max_length=INTEREST_NAMES_MAX)
    lamport_from: _Lamport | None = None
    lamport_to: _Lamport | None = None

    @model_validator(mode="after")
    def _says_what(self) -> InterestBody:
        # An empty body must not end all syncs.
        if not self.model_fields_set & {"all", "channels", "prefixes"}:
            raise ValueError("name all, channels or prefixes")
        if self.all and (self.channels or self.prefixes):
            raise ValueError("all: true cannot be combined with channels or prefixes")
        return self


@router.get(
    "/v1/recon/interests",
    **documented({200: reply("The interest", InterestJson, "Interest, canonical")}),
)
async def get_interests(call: Annotated[Call, admitted(Scope.SYNC)]) -> Reply:
    """The part of this node's interest that the caller may read: the canonical `Interest`, or JSON.

    JSON also says where the interest comes from: the settings, or an operator.
    """
    state = call.node.interests.state
    interest = call.caller.readable_part(state.interest)
    headers = [READS_ZSTD, (INSTANCE_HEADER.encode(), call.node.instance_id.encode())]
    if call.form is Form.PROTOBUF:
        return protobuf_reply(interest.encode(), 200, headers)
    return json_reply({**state.document(), **interest_document(interest)}, 200, headers)


@router.put(
    "/v1/recon/interests",
    **documented({200: reply("The interest", ChangedInterest)}, body(content(InterestBody))),
)
async def set_interests(
    call: Annotated[
        Call, admitted(Scope.ADMIN, body_bytes_max=lambda limits: limits.small_body_bytes_max)
    ],
    body: Annotated[InterestBody, json_body(InterestBody)],
) -> Reply:
    """Change what this node syncs with its peers; it is kept, and wins over the settings until a DELETE.

    More is fetched at once. What is not wanted any more stays readable and is not synced; the reply
    counts it.
    """
    low, high = (
        None if each is None else int(each) for each in (body.lamport_from, body.lamport_to)
    )
    interest = made_interest(
        everything=body.all,
        channels=frozenset(body.channels),
        prefixes=frozenset(body.prefixes),
        lamport_from=low,
        lamport_to=high,
    )
    return await _changed(call, await call.node.interests.set(interest))


@router.delete("/v1/recon/interests", **documented({200: reply("The interest", ChangedInterest)}))
async def reset_interests(call: Operator) -> Reply:
    """Return to the interest of the settings."""
    return await _changed(call, await call.node.interests.reset())


async def _changed(call: Call, state: InterestState) -> Reply:
    call.target = described(state.interest)
    channels_count, entries_count = await call.node.index.outside(state.interest)
    outside: dict[str, Any] = {"channels": channels_count, "entries": entries_count}
    if entries_count:
        outside["detail"] = STAYS
    return json_only({**state.document(), "outside": outside})
