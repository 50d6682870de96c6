"""What a fault raises that has not happened and will not."""

from __future__ import annotations


class FaultImpossible(Exception):
    """The fault cannot be done here; the text says why, as a sentence. Nothing has happened."""
