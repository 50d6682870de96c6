"""`make chaos SEED=1`: every scenario in full, in an order that the seed decides. The last line is one JSON object."""

from __future__ import annotations

import json
import os
import random
import sys

from chaos.scenarios import (
    AFTER,
    BEFORE,
    Scenario,
    chaos_system,
    fill_redis,
    flush_redis,
    kill_services,
    restart_postgresql,
    stop_redis,
    tell,
)
from tests.servers.broker import debian_redis
from tests.servers.postgresql import Postgresql

REDIS_GONE_S = 60.0
REDIS_FULL_S = 20.0
DATABASE_AWAY_S = 20.0


def main() -> int:
    seed = int(os.environ.get("SEED") or 1)
    scenarios = [Scenario(name=f"worker killed at {name}", failpoints=[name]) for name in (*BEFORE, *AFTER)]
    scenarios.append(Scenario(name="Redis flushed", disturb=flush_redis))
    scenarios.append(Scenario(name=f"Redis gone for {REDIS_GONE_S:.0f} s", disturb=stop_redis(REDIS_GONE_S)))
    scenarios.append(Scenario(name=f"Redis full for {REDIS_FULL_S:.0f} s", disturb=fill_redis(REDIS_FULL_S)))
    scenarios.append(Scenario(name="web killed", disturb=kill_services("web")))
    scenarios.append(Scenario(name="beat killed", disturb=kill_services("beat")))
    everything = kill_services("web", "worker", "beat", redis_too=True)
    scenarios.append(Scenario(name="web, worker, beat and Redis killed together", disturb=everything))
    random.Random(seed).shuffle(scenarios)
    outcomes = []
    with chaos_system() as chaos:
        for scenario in scenarios:
            outcomes.append(chaos.run(scenario))
            tell(outcomes[-1])
    with Postgresql() as server, chaos_system(broker_program=debian_redis(), database_url=server.url) as chaos:
        restart = restart_postgresql(server, away_s=DATABASE_AWAY_S)
        for scenario in (
            Scenario(name=f"PostgreSQL gone for {DATABASE_AWAY_S:.0f} s", disturb=restart),
            Scenario(name="web, worker, beat and Redis killed together, on PostgreSQL", disturb=everything),
        ):
            outcomes.append(chaos.run(scenario))
            tell(outcomes[-1])
    result = {
        "seed": seed,
        "scenarios": len(outcomes),
        "recovered": sum(outcome.state == "recovered" for outcome in outcomes),
        "worker_kills": sum(outcome.worker_kills for outcome in outcomes),
        "slowest_s": max(outcome.seconds for outcome in outcomes),
        "violations": [f"{outcome.name}: {words}" for outcome in outcomes for words in outcome.wrong],
    }
    print(json.dumps(result), flush=True)
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
