"""Value types that the API's documents share: moments as RFC 3339 in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema

from agents.protocol.messages import ProofKind


def rfc3339(at: float) -> str:
    """Unix seconds as RFC 3339 in UTC with microseconds, for example `2031-05-04T03:02:01.250000Z`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Moment = Annotated[
    float,
    PlainSerializer(rfc3339, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
]


class Document(BaseModel):
    """Base of what the API answers; made from the values of `recovery.queries` by their attributes."""

    model_config = ConfigDict(from_attributes=True)


class Request(BaseModel):
    """Base of what the API takes; a member that it does not know is refused."""

    model_config = ConfigDict(extra="forbid")


class ProofDocument(Document):
    """Why nothing of a generation can act on a node any more."""

    node: str
    generation: int
    kind: ProofKind
    at: Moment
    evidence: str
    confirmed: bool = Field(description="The node's own agent has said so too.")
