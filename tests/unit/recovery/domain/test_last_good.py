from __future__ import annotations

from recovery.domain.last_good import LastGood, judge_last_good

NOW = 100_000.0


def judged(
    *, usable: list[float], saved: list[float] | None = None, since: float = NOW - 50_000, limit: float | None = None
) -> LastGood:
    return judge_last_good(
        usable_saved_at=usable,
        saved_at=usable if saved is None else saved,
        training_since=since,
        wanted_limit_s=limit,
        now=NOW,
    )


def test_three_intervals_are_the_limit_where_that_is_more_than_half_an_hour() -> None:
    hourly = [NOW - 3600.0 * n for n in range(1, 6)]
    assert (judged(usable=hourly).limit_s, judged(usable=hourly).too_old) == (10_800.0, False)
    quick = [NOW - 60.0 * n for n in range(1, 6)]
    assert judged(usable=quick).limit_s == 1800.0


def test_the_age_is_that_of_the_newest_that_may_be_trusted() -> None:
    found = judged(usable=[NOW - 4000.0], saved=[NOW - 4000.0, NOW - 3000.0, NOW - 2000.0, NOW - 1000.0])
    assert (found.age_s, found.limit_s, found.too_old) == (4000.0, 3000.0, True)


def test_time_in_which_nothing_trained_does_not_count() -> None:
    assert judged(usable=[NOW - 40_000.0], since=NOW - 100.0).age_s == 100.0


def test_a_job_that_has_saved_nothing_is_judged_by_its_training_time() -> None:
    assert judged(usable=[], since=NOW - 1801.0).too_old
    assert not judged(usable=[], since=NOW - 1799.0).too_old


def test_the_job_may_ask_for_a_limit_of_its_own() -> None:
    found = judged(usable=[NOW - 100.0], limit=90.0)
    assert (found.too_old, found.reason) == (True, "as the job asks")
