"""`everstep drill run --wait`: each sentence once, an end, a time limit."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.cli.client import TimeRanOut, Unreachable
from everstep.cli.drills import follow


class ToldServer:
    """Answers as the API does; each look at the drill moves the story on by one entry."""

    def __init__(self, *, entries: int, ends: bool = True, silent_at: int | None = None) -> None:
        self.entries, self.ends, self.silent_at, self.looks = entries, ends, silent_at, 0

    def get(self, path: str, **query: Any) -> Any:
        if path.startswith("drills/"):
            self.looks += 1
            if self.looks == self.silent_at:
                raise Unreachable("No answer.")
            return {"id": "drl_a", "incident": "inc_a" if self.looks > 1 else None, "ended": self.ends and self._told}
        items = [{"seq": seq, "text": f"entry {seq}"} for seq in range(1, min(self.looks, self.entries) + 1)]
        after = [item for item in items if item["seq"] > query["after_seq"]]
        return {"items": after[:2], "last_seq": items[-1]["seq"]}

    @property
    def _told(self) -> bool:
        return self.looks > self.entries


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def told(server: ToldServer, *, timeout_s: float = 60) -> list[int]:
    clock, heard = Clock(), []
    follow(
        server,  # type: ignore[arg-type]
        "drl_a",
        timeout_s=timeout_s,
        tell=lambda entry: heard.append(entry["seq"]),
        clock=clock,
        sleep=clock.sleep,
    )
    return heard


def test_every_entry_is_told_once_and_in_order() -> None:
    assert told(ToldServer(entries=7)) == [1, 2, 3, 4, 5, 6, 7]


def test_server_that_restarts_in_the_middle_is_asked_again() -> None:
    assert told(ToldServer(entries=5, silent_at=3)) == [1, 2, 3, 4, 5]


def test_time_that_runs_out_says_that_the_drill_goes_on() -> None:
    with pytest.raises(TimeRanOut, match="it goes on"):
        told(ToldServer(entries=3, ends=False), timeout_s=5)
