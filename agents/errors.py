"""The error family of the node agent. Each class says whether trying again can help, and each text what to do."""

from __future__ import annotations


class AgentError(Exception):
    """Base of what the agent raises on purpose."""

    retryable = False


class SettingsInvalid(AgentError):
    """The command line or the environment does not make sense; the operator has to change it."""


class StateUnusable(AgentError):
    """The state directory cannot be used or holds something that cannot be trusted."""


class PolicyUnreadable(AgentError):
    """The node's policy file is missing or wrong; the agent does not start without the policy it was told to obey."""


class PolicyRefused(AgentError):
    """The node's own policy forbids this launch, whatever the server says."""


class JoinRefused(AgentError):
    """The server does not accept the join token or the node's name."""


class ServerUnreachable(AgentError):
    """The server did not answer, or answered that it is not able to right now."""

    retryable = True


class CheckFailed(AgentError):
    """A launch cannot be prepared on this node; `reason` is the machine-readable cause of `AssignmentReport`."""

    def __init__(self, detail: str, *, reason: str) -> None:
        super().__init__(detail)
        self.reason = reason


class StartFailed(AgentError):
    """The runner's process could not be started."""
