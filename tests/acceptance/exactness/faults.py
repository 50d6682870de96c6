"""The faults of `make exactness`: drawn from a seed, fired at their moment, and shown to have hit it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from everstep.save_requests import TERM_EXIT_CODE
from exactness.live import DidNotHappen, Live
from exactness.moments import Caught, Moment, SaveWatch, SnapshotWatch, Watch, let_go

_SAVE_LIMIT_S = 60.0
_TERM_LIMIT_S = 60.0
_TERM_STEPS = 60
"""Ranks look about once a second whether to end, and a step takes 20 ms at least."""
_LOOK_FOR_WRITERS_S = 0.25


class Kind(StrEnum):
    """What happens. A killed runner takes all its ranks and their writer along."""

    RANK = "rank killed"
    RUNNER = "runner killed"
    SAVE = "kill in mid-save"
    FLUSH = "kill in mid-flush"
    SNAPSHOT = "kill in mid-snapshot"
    TERM = "SIGTERM"


ON_DISK = (Kind.RANK, Kind.RUNNER, Kind.SAVE, Kind.FLUSH, Kind.TERM)
IN_MEMORY = (Kind.RANK, Kind.RUNNER, Kind.SNAPSHOT, Kind.SAVE, Kind.FLUSH)
"""SIGTERM ends with a save on disk, and so proves nothing of memory."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fires after `step`, or in a save that begins behind it; `late` is how far into the step, from 0 to 1."""

    kind: Kind
    step: int
    late: float
    victim: str
    """`rank`, `runner` or `writer`."""
    rank: int
    moment: Moment | None = None


@dataclass(frozen=True, kw_only=True)
class Fired:
    """`step`: the last one that any rank had reported. `ends`: the generation is over."""

    fault: Fault
    step: int
    words: str
    ends: bool

    def __str__(self) -> str:
        return f"{self.fault.kind} at step {self.step} ({self.words})"


def draw_faults(
    seed: str, kinds: Sequence[Kind], *, count: int, ranks: int, steps: int, save_every: int
) -> list[Fault]:
    """`count` faults at random points, each kind once before one comes again, in the order of their steps.

    The last point leaves a few saves for those that wait for one, and the steps that ranks need to agree on SIGTERM.
    """
    draw = random.Random(seed)
    drawn: list[Kind] = []
    while len(drawn) < count:
        drawn += draw.sample(kinds, len(kinds))
    last = steps - max(3 * save_every, min(_TERM_STEPS, steps // 3))
    points = sorted(draw.sample(range(3, last), count))
    return [_draw_fault(draw, kind, step=step, ranks=ranks) for kind, step in zip(drawn, points, strict=False)]


def _draw_fault(draw: random.Random, kind: Kind, *, step: int, ranks: int) -> Fault:
    victims, moments = {
        Kind.RANK: (["rank"], []),
        Kind.RUNNER: (["runner"], []),
        Kind.SAVE: (["rank", "runner", "writer"], [Moment.WRITING]),
        Kind.FLUSH: (["rank", "runner"], [Moment.PUBLISHING, Moment.WAITING]),
        Kind.SNAPSHOT: (["rank", "runner", "writer"], [Moment.KEEPING]),
        Kind.TERM: (["rank"], []),
    }[kind]
    return Fault(
        kind=kind,
        step=step,
        late=draw.random(),
        victim=draw.choice(victims),
        rank=draw.randrange(ranks),
        moment=draw.choice(moments) if moments else None,
    )


def fire(fault: Fault, live: Live) -> Fired:
    """Wait for the fault's moment, and let it happen. Raises `DidNotHappen` if the moment never came."""
    live.wait_for_step(fault.step)
    if fault.moment is not None:
        return _fire_in_save(fault, live, fault.moment)
    time.sleep(fault.late * live.step_time_s)
    step = live.last_step()
    if fault.kind is Kind.TERM:
        return _terminate(fault, live)
    who = _kill(fault, live)
    return Fired(fault=fault, step=step, words=who, ends=True)


def _fire_in_save(fault: Fault, live: Live, moment: Moment) -> Fired:
    caught = _catch(live, moment)
    step = live.last_step()
    writers = live.writers()
    try:
        who = _kill(fault, live)
    finally:
        let_go(writers)  # those of them that still live: their ranks are gone, or will be
    if live.has_lost_writer_of(caught.path) and live.counts(caught.path):
        raise DidNotHappen(f"{caught.path} became complete, though its writer was killed before")
    words = f"{who}; save of step {caught.step}: {moment}"
    return Fired(fault=fault, step=step, words=words, ends=fault.victim != "writer")


def _catch(live: Live, moment: Moment) -> Caught:
    deadline, writers, looked = time.monotonic() + _SAVE_LIMIT_S, list[int](), 0.0
    with _watch(live, moment) as watch:
        while (now := time.monotonic()) < deadline and not live.ended():
            if now > looked + _LOOK_FOR_WRITERS_S:  # not at each turn: the next moment may be a millisecond away
                writers, looked = live.writers(), now
            if caught := watch.catch(moment, writers, limit_s=0.1):
                return caught
    raise DidNotHappen(f"no save was caught where {moment}")


def _watch(live: Live, moment: Moment) -> Watch:
    if moment is Moment.KEEPING:
        return SnapshotWatch(live.memory, generation=live.number)
    return SaveWatch(live.save_directory(), world_size=live.world_size)


def _kill(fault: Fault, live: Live) -> str:
    """Who was killed. It has been seen that what must die with it is dead."""
    live.writers()
    kill: dict[str, Callable[[int], str]] = {
        "rank": live.kill_rank,
        "runner": live.kill_runner_of,
        "writer": live.kill_writer_of,
    }
    return kill[fault.victim](fault.rank)


def _terminate(fault: Fault, live: Live) -> Fired:
    told_at = live.last_step()
    codes = live.terminate(fault.rank, limit_s=_TERM_LIMIT_S)
    # On a busy machine torch elastic may lose patience with the others once the first has left; all is saved by then.
    if TERM_EXIT_CODE not in codes.values() or not set(codes.values()) <= {TERM_EXIT_CODE, None}:
        raise DidNotHappen(f"after SIGTERM to rank {fault.rank} the ranks ended with {codes}")
    step = live.last_step()
    if not live.is_complete(step):
        raise DidNotHappen(f"after SIGTERM to rank {fault.rank} all ended at step {step}, and it is not saved")
    return Fired(fault=fault, step=step, words=f"to rank {fault.rank} at step {told_at}", ends=True)
