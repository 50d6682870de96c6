from __future__ import annotations

import json
import resource
from pathlib import Path

from everstep.elastic.journal import EVENTS_FILE, Journal
from everstep.telemetry import Telemetry


def test_full_disk_stops_nobody_and_what_it_refused_is_written_when_there_is_room(tmp_path: Path) -> None:
    journal = Journal(tmp_path, Telemetry(socket_path=None, job="j1", generation=1))
    journal.write("runner_started", pid=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size_bytes = (tmp_path / EVENTS_FILE).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 7, limits[1]))
    try:
        journal.write("rank_started", rank=0)
        journal.write("rank_exited", rank=0)
        assert (tmp_path / EVENTS_FILE).stat().st_size == size_bytes + 7
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.write("runner_ended")
    lines = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["runner_started", "rank_started", "rank_exited", "runner_ended"]
