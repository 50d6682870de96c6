"""Between rows and domain values: nothing is decided here."""

from recovery.store.serialize import from_json, to_json

__all__ = ["from_json", "to_json"]
