"""Keyset pages: lists go on after a position, so that rows inserted meanwhile neither repeat nor hide others."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q


@dataclass(frozen=True, kw_only=True)
class Position:
    """The last row of a page in a list that is sorted newest first, then by id."""

    at: float
    id: str

    def further(self, time_field: str) -> Q:
        """Condition for the rows after this one."""
        return Q(**{f"{time_field}__lt": self.at}) | Q(**{time_field: self.at, "id__lt": self.id})
