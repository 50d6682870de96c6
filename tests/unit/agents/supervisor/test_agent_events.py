"""What a runner writes is read from where we stopped, and nothing else than a regular file is opened."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agents.supervisor.events import EventTail, LeaseExpired, LineTail, RankBegan, RankEnded, RunnerEnded


def test_reads_only_what_is_new_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    path.write_text('{"kind":"rank_started","rank":0,"pid":7,"at":1.0}\n{"kind":"rank_ex')
    assert tail.read() == [RankBegan(rank=0, pid=7, at=1.0)]
    with path.open("a") as file:
        file.write('ited","rank":0,"pid":7,"exit_code":null,"signal":9,"at":2.0,"detail":""}\n')
    assert tail.read() == [RankEnded(rank=0, pid=7, exit_code=None, signal=9, at=2.0)]
    assert tail.read() == []


def test_passes_over_what_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        b"nonsense",
        b'{"kind":"shell","at":1}',
        b'{"kind":"rank_started","rank":-1,"pid":7,"at":1}',
        b'{"kind":"rank_started","rank":0,"pid":0,"at":1}',
        b"\xff\xfe",
        json.dumps({"kind": "runner_ended", "at": 3.0, "reason": "port_busy", "detail": "x", "new": 1}).encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    tail = EventTail(path)
    assert tail.read() == [RunnerEnded(at=3.0, reason="port_busy", detail="x")]
    assert tail.malformed == 5


def test_opens_neither_links_nor_pipes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("line\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    assert LineTail(tmp_path / "link").lines() == []
    assert LineTail(tmp_path / "pipe").lines() == []
    assert LineTail(tmp_path / "secret").lines() == [b"line"]


def test_an_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    tail = LineTail(path)
    with path.open("ab") as file:
        for _ in range(4):
            file.write(b"x" * (1 << 20))
            file.flush()
            assert tail.lines() == []
    assert len(tail._rest) <= 64 * 1024


def test_reads_that_the_lease_ran_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind":"lease_expired","at":1.0,"silent_s":21.5,"limit_s":15.0}\n')
    assert EventTail(tmp_path / "events.jsonl").read() == [LeaseExpired(at=1.0, silent_s=21.5, limit_s=15.0)]
