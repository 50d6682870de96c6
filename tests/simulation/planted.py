"""Bugs that can be planted into the real decisions, to see that the simulation finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from recovery.domain import absences, lease, trust
from recovery.domain.generations import GenerationView

PLANTS = {
    "no-fence": "a generation looks fenced although no proof of stop has come",
    "no-lease-margin": "the server counts a lease without a margin for clocks and for the kill",
    "lease-without-stopped-peer": "a lease is believed to prove something although no rank of the job has stopped",
    "old-plan-accepted": "agents keep no record of generations and take whatever they are told",
    "no-taint": "nothing that goes wrong after a load, or before a save, is held against a checkpoint",
    "one-witness": "a node's silence alone makes it lost",
}


class NeverFenced(GenerationView):
    """A generation that looks fenced whatever is proven."""

    @property
    def fenced(self) -> bool:
        return True


@contextmanager
def planted(plant: str) -> Iterator[None]:
    """Run a decision with the bug in it; `no-fence` and `old-plan-accepted` are planted where they are needed."""
    with ExitStack() as changes:
        match plant:
            case "no-lease-margin":
                changes.enter_context(mock.patch.object(lease, "MARGIN_S", 0.0))
                changes.enter_context(mock.patch.object(lease, "DRIFT", 0.0))
            case "lease-without-stopped-peer":
                changes.enter_context(mock.patch.object(lease, "peer_stopped_at", lambda share, generation: 0.0))
            case "no-taint":
                changes.enter_context(mock.patch.object(trust, "_taint", lambda *told: ""))
            case "one-witness":
                changes.enter_context(mock.patch.object(absences, "is_confirmed", bool))
        yield
