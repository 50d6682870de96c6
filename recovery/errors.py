"""The error family of recovery. Each says what was attempted, on what, and what to do."""

from __future__ import annotations


class RecoveryError(Exception):
    """Base; `retryable` says whether the same call may work later without a change."""

    retryable = False
    kind = "recovery_error"


class NotFound(RecoveryError):
    kind = "not_found"


class JobRefused(RecoveryError):
    """The job spec cannot be accepted as it is."""

    kind = "job_refused"


class DrillRefused(RecoveryError):
    """A guard forbids the drill right now; `guard` names it."""

    retryable = True
    kind = "drill_refused"

    def __init__(self, guard: str, message: str) -> None:
        super().__init__(message)
        self.guard = guard


class JoinRefused(RecoveryError):
    """A join token or node name was not accepted."""

    kind = "join_refused"


class CommandRefused(RecoveryError):
    """An operator's action does not fit the present state."""

    kind = "command_refused"


class FenceRefused(CommandRefused):
    """Nobody's word that this node is off is taken now, or nobody is there who could switch it off."""

    kind = "fence_refused"


class NotConfirmed(CommandRefused):
    """What was typed to confirm is not the node's name."""

    kind = "not_confirmed"
