"""The REST API under `/api/v1/`, and the health addresses at the root. Handlers parse, call recovery once, present."""
