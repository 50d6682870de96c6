"""The error family of the training side: each says what was attempted, on what, and what to do."""

from __future__ import annotations


class EverstepError(Exception):
    """Base; `retryable` says whether the same call may work later without a change."""

    retryable = False


class UsageError(EverstepError):
    """The training script calls Everstep in a way that cannot work; the message says what to change."""


class UnsupportedState(EverstepError):
    """A tracked object's state holds something that a checkpoint cannot hold."""


class CheckpointMissing(EverstepError):
    """The checkpoint that the plan names is not there, or is not complete."""


class CheckpointDamaged(EverstepError):
    """A checkpoint's files are not what its manifest says; another checkpoint may still be whole."""


class SaveFailed(EverstepError):
    """A checkpoint could not be written. Training goes on, and the next save tries again."""

    retryable = True


class BadDatagram(EverstepError):
    """Bytes on the rank socket are not one of our datagrams."""


class BadLaunch(EverstepError):
    """The runner's `launch.json` is missing or does not describe a launch."""


class LeaseUnusable(EverstepError):
    """The files of a lease that must be kept are not there or cannot be used."""
