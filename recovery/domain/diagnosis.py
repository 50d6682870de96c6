"""What broke first, and what only died of it."""

from __future__ import annotations

from collections.abc import Sequence

from recovery.domain.generations import RankView
from recovery.domain.incident import Cause, CauseKind

RULE_VERSION = "diagnosis-1"

TIE_WINDOW_S = 0.01
"""Two deaths of the same class closer than this are a tie: one pidfd wake-up and one scheduler tick on a busy node."""

_SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def diagnose(ranks: Sequence[RankView]) -> Cause | None:
    """Order the dead ranks by class of evidence, then by time. None if no rank died.

    A signal is first-hand; an error of a rank's own may be the echo of a peer's death (a failed collective), so that a
    signal within the same second outranks it.
    """
    dead = sorted((rank for rank in ranks if rank.died), key=_precedence)
    if not dead:
        return None
    first = dead[0]
    tied = tuple(
        rank.rank
        for rank in dead[1:]
        if _class(rank) == _class(first) and (rank.exited_at or 0) - (first.exited_at or 0) <= TIE_WINDOW_S
    )
    return Cause(
        kind=_kind(first),
        rank=first.rank,
        node=first.node,
        sentence=_sentence(first, tied),
        tied_with=tied,
        cascade=tuple(sorted(rank.rank for rank in dead[1:] if rank.rank not in tied)),
    )


def _class(rank: RankView) -> int:
    return 0 if rank.signal else 1


def _precedence(rank: RankView) -> tuple[float, int, float, int]:
    at = rank.exited_at or 0.0
    # An own error more than a second before any signal is no echo of it.
    return (at if _class(rank) == 0 else at + 1.0, _class(rank), at, rank.rank)


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
