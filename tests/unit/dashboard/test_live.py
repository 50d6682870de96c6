"""The live feed with Redis and database played by values, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisAway

from dashboard.live import FeedMode, LiveFeed, Subscription, _entries
from recovery.queries.positions import TopicPosition

pytestmark = pytest.mark.looptime


class PlayedRedis:
    """A stream that the test writes; while `away` is set every call fails, while `silent` none returns."""

    def __init__(self) -> None:
        self.away = False
        self.silent = False
        self.written: list[tuple[str, dict[str, str]]] = []

    def write(self, topic: str, seq: int) -> None:
        self.written.append((f"{len(self.written) + 1}-0", {"topic": topic, "seq": str(seq)}))

    async def xrevrange(self, name: str, count: int) -> list[tuple[str, dict[str, str]]]:
        await self._answer()
        return self.written[-count:]

    async def xread(self, streams: dict[str, str], *, count: int, block: int) -> Any:
        await self._answer()
        (last,) = streams.values()
        fresh = self.written[int(last.partition("-")[0]) :]
        if not fresh:
            await asyncio.sleep(block / 1000)
        return {"everstep:live": [fresh]} if fresh else None

    async def aclose(self) -> None:
        pass

    async def _answer(self) -> None:
        if self.away:
            raise RedisAway("no such socket")
        if self.silent:
            await asyncio.Event().wait()


class PlayedRows:
    """Positions of topics as the database would tell them."""

    def __init__(self) -> None:
        self.seqs: dict[str, int] = {}

    async def __call__(self, topics: Iterable[str]) -> dict[str, TopicPosition]:
        return {
            topic: TopicPosition(seq=self.seqs[topic], mark=str(self.seqs[topic]))
            for topic in topics
            if topic in self.seqs
        }


@pytest.fixture
def redis() -> PlayedRedis:
    return PlayedRedis()


@pytest.fixture
def rows() -> PlayedRows:
    return PlayedRows()


@pytest.fixture
def feed(redis: PlayedRedis, rows: PlayedRows) -> LiveFeed:
    return LiveFeed(connect=lambda: redis, positions=rows)  # type: ignore[arg-type, return-value]


async def news(subscription: Subscription, within_s: float = 30.0) -> dict[str, int]:
    """The next change; wake-ups that bring none are passed over."""
    async with asyncio.timeout(within_s):
        while not (changed := await subscription.take()):
            pass
    return changed


async def test_slow_socket_gets_only_the_newest_seq_of_each_topic() -> None:
    subscription = Subscription(["incident:a", "job:b"])
    for seq in range(1, 251):
        subscription.offer("incident:a", seq)
    subscription.offer("job:b", 7)
    subscription.offer("job:other", 9)
    assert await subscription.take() == {"incident:a": 250, "job:b": 7}


async def test_late_announcement_does_not_take_a_seq_back() -> None:
    subscription = Subscription(["incident:a"])
    subscription.offer("incident:a", 5)
    subscription.offer("incident:a", 4)
    assert await subscription.take() == {"incident:a": 5}


async def test_star_takes_every_topic_of_its_kind() -> None:
    subscription = Subscription(["incident:*"])
    subscription.offer("incident:a", 3)
    subscription.offer("job:b", 4)
    assert await subscription.take() == {"incident:*": 3}


@pytest.mark.parametrize(
    "answer",
    [
        {"everstep:live": [[["1-0", {"topic": "fleet", "seq": "3"}]]]},
        {b"everstep:live": [[(b"1-0", {b"topic": "fleet", b"seq": "3"})]]},
        [["everstep:live", [("1-0", {"topic": "fleet", "seq": "3"})]]],
    ],
    ids=["RESP3", "RESP3 bytes", "RESP2"],
)
def test_reads_the_answers_of_both_protocols(answer: Any) -> None:
    assert _entries(answer) == [("1-0", {"topic": "fleet", "seq": "3"})]


@pytest.mark.parametrize("answer", [None, {}, []])
def test_reads_no_news_as_none(answer: Any) -> None:
    assert _entries(answer) == []


async def test_subscriber_is_first_told_where_its_topics_stand(feed: LiveFeed, rows: PlayedRows) -> None:
    rows.seqs = {"incident:a": 12}
    async with feed.subscribe(["incident:a", "incident:unknown"]) as subscription:
        assert await news(subscription) == {"incident:a": 12}


async def test_follows_the_stream_while_redis_is_there(feed: LiveFeed, redis: PlayedRedis) -> None:
    redis.write("incident:a", 1)
    async with feed.subscribe(["incident:a"]) as subscription:
        redis.write("incident:a", 2)
        assert await news(subscription) == {"incident:a": 2}
        assert feed.mode is FeedMode.LIVE


async def test_polls_the_rows_while_redis_is_away_and_says_so(
    feed: LiveFeed, redis: PlayedRedis, rows: PlayedRows
) -> None:
    redis.away = True
    async with feed.subscribe(["incident:a"]) as subscription:
        await asyncio.sleep(5)
        assert feed.mode is FeedMode.POLLING
        rows.seqs = {"incident:a": 4}
        assert await news(subscription, within_s=2) == {"incident:a": 4}


async def test_silent_redis_counts_as_away(feed: LiveFeed, redis: PlayedRedis, rows: PlayedRows) -> None:
    async with feed.subscribe(["incident:a"]) as subscription:
        redis.silent = True
        await asyncio.sleep(5)
        assert feed.mode is FeedMode.POLLING
        rows.seqs = {"incident:a": 4}
        assert await news(subscription) == {"incident:a": 4}


async def test_goes_back_to_the_stream_and_tells_what_was_missed(
    feed: LiveFeed, redis: PlayedRedis, rows: PlayedRows
) -> None:
    redis.away = True
    async with feed.subscribe(["incident:a"]) as subscription:
        await asyncio.sleep(5)
        redis.away = False
        rows.seqs = {"incident:a": 4}
        assert await news(subscription) == {"incident:a": 4}
        await asyncio.sleep(5)
        assert feed.mode is FeedMode.LIVE
        redis.write("incident:a", 5)
        assert await news(subscription) == {"incident:a": 5}


async def test_who_joins_during_a_burst_learns_of_its_end(feed: LiveFeed, redis: PlayedRedis, rows: PlayedRows) -> None:
    """200 joins, each while entries are being written: none may be left with an older seq than the last."""

    async def join(after_s: float) -> int:
        await asyncio.sleep(after_s)
        known = 0
        async with feed.subscribe(["incident:a"]) as subscription:
            while known < 1000:
                known = max(known, (await news(subscription))["incident:a"])
        return known

    async def burst() -> None:
        for seq in range(1, 1001):
            rows.seqs = {"incident:a": seq}
            redis.write("incident:a", seq)
            await asyncio.sleep(0.001)

    joins = [join(number * 0.005) for number in range(200)]
    known = await asyncio.gather(burst(), *joins)
    assert known[1:] == [1000] * 200


async def test_lost_announcement_costs_seconds(feed: LiveFeed, rows: PlayedRows) -> None:
    async with feed.subscribe(["incident:a"]) as subscription:
        await asyncio.sleep(1)
        rows.seqs = {"incident:a": 4}
        assert await news(subscription, within_s=12) == {"incident:a": 4}


async def test_nothing_runs_when_nobody_listens(feed: LiveFeed) -> None:
    async with feed.subscribe(["fleet"]):
        running = [task for task in asyncio.all_tasks() if task.get_name() == "live-feed"]
        assert len(running) == 1
    await asyncio.sleep(0.1)
    assert running[0].done()
