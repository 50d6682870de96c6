"""What broke first, and what only died of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from recovery.domain.generations import RankView
from recovery.domain.incident import Cause, CauseKind

RULE_VERSION = "diagnosis-2"

TIE_WINDOW_S = 0.01
"""Two deaths of the same class closer than this are a tie: one pidfd wake-up and one scheduler tick on a busy node."""

OWN_ERROR_LAG_S = 1.0
"""An error of a rank's own may be the echo of a signal that was told this much later by another node."""

ECHO_LAG_S = 3.0
"""A collective's error outruns its cause by this much at most: the culprit prints, tears down and only then exits."""

_COLLECTIVE_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "nccl",
    "gloo",
    "distbackenderror",
    "distnetworkerror",
    "distributed process group",
    "process group",
    "processgroup",
    "collective",
    "rendezvous",
)
"""What torch and its backends write when a peer is gone (messages of torch 2.9 with gloo and NCCL)."""

_SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def diagnose(ranks: Sequence[RankView]) -> Cause | None:
    """Order the dead ranks by class of evidence, then by time. None if no rank died.

    A signal is first-hand, unless a rank of the same node died before: then the runner cleared the node. An error of a
    rank's own comes before a collective's, which only says that some peer is gone.
    """
    classes = {rank.rank: _class(rank, ranks) for rank in ranks if rank.died}
    dead = sorted(
        (rank for rank in ranks if rank.died), key=lambda rank: (_ready_at(rank, classes), *_tie_break(rank, classes))
    )
    if not dead:
        return None
    first = dead[0]
    tied = tuple(
        rank.rank
        for rank in dead[1:]
        if classes[rank.rank] is classes[first.rank] and (rank.exited_at or 0) - (first.exited_at or 0) <= TIE_WINDOW_S
    )
    return Cause(
        kind=_kind(first),
        rank=first.rank,
        node=first.node,
        sentence=_sentence(first, tied),
        tied_with=tied,
        cascade=tuple(sorted(rank.rank for rank in dead[1:] if rank.rank not in tied)),
    )


def is_echo(rank: RankView, ranks: Sequence[RankView]) -> bool:
    """Whether a dead rank only says that some peer is gone."""
    return _class(rank, ranks) is _Evidence.ECHO


class _Evidence(IntEnum):
    SIGNAL = 0
    OWN_END = 1
    ECHO = 2


_LAG_S = {_Evidence.SIGNAL: 0.0, _Evidence.OWN_END: OWN_ERROR_LAG_S, _Evidence.ECHO: ECHO_LAG_S}


def _class(rank: RankView, ranks: Sequence[RankView]) -> _Evidence:
    if rank.signal:
        return _Evidence.ECHO if _was_cleared_away(rank, ranks) else _Evidence.SIGNAL
    words = rank.detail.lower()
    return _Evidence.ECHO if any(word in words for word in _COLLECTIVE_WORDS) else _Evidence.OWN_END


def _was_cleared_away(rank: RankView, ranks: Sequence[RankView]) -> bool:
    """Another rank of the node died clearly before: torch elastic ends the rest by SIGTERM, then SIGKILL."""
    return any(
        other.died and other.node == rank.node and (rank.exited_at or 0.0) - (other.exited_at or 0.0) > TIE_WINDOW_S
        for other in ranks
    )


def _ready_at(rank: RankView, classes: Mapping[int, _Evidence]) -> float:
    return (rank.exited_at or 0.0) + _LAG_S[classes[rank.rank]]


def _tie_break(rank: RankView, classes: Mapping[int, _Evidence]) -> tuple[int, float, int]:
    return classes[rank.rank], rank.exited_at or 0.0, rank.rank


def _kind(rank: RankView) -> CauseKind:
    if rank.signal:
        return CauseKind.RANK_KILLED
    return CauseKind.EARLY_EXIT if rank.exit_code == 0 else CauseKind.RANK_FAILED


def _sentence(rank: RankView, tied: tuple[int, ...]) -> str:
    where = f"Rank {rank.rank} on {rank.node}"
    if rank.signal:
        name = _SIGNAL_NAMES.get(rank.signal, "")
        what = f"{where} was killed by signal {rank.signal}" + (f" ({name})" if name else "")
    elif rank.exit_code == 0:
        step = "any step" if rank.last_step is None else f"its last step (it stood at step {rank.last_step})"
        what = f"{where} exited with code 0 before {step}"
    else:
        code = "without a known exit code" if rank.exit_code is None else f"with code {rank.exit_code}"
        what = f"{where} exited {code}"
        if rank.detail:
            what += f": {rank.detail.strip().splitlines()[-1][:300]}"
    if rank.last_step is not None and rank.exit_code != 0:
        what += f", after step {rank.last_step}"
    if tied:
        what += f"; it ties with rank {', '.join(map(str, tied))}"
    return f"{what}."
