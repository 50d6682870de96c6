"""Agents join here: a join token is exchanged for the node's own credential."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Router
from pydantic import Field

from dashboard.api.rates import AddressLimit
from dashboard.api.values import Document, Request
from recovery.access import join_node

router = Router(tags=["agents"])

join_limit = AddressLimit(requests=60, window_s=60.0)


class JoinRequest(Request):
    token: str = Field(max_length=200, description="A join token; it is used up by this.")
    node: str = Field(max_length=200, description="The node's name.")


class Joined(Document):
    node: str
    credential: str = Field(description="The node's own credential; shown once, never stored by the server.")


@router.post("/join", auth=None, throttle=join_limit, response={201: Joined}, operation_id="join_agent")
def join(request: HttpRequest, body: JoinRequest) -> Joined:
    """Exchange a join token for the node's credential.

    Needs no other credential; limited to 60 requests a minute and address. `Idempotency-Key` has no effect here, since
    the answer is a secret and is never stored: a node that joins again gets a new credential and the old one ends.
    """
    return Joined(node=body.node, credential=join_node(token=body.token, node_name=body.node))
