"""What all tests share: hypothesis' profiles, and the servers that stand behind the rows.

Property tests have no clock, and in CI they draw the same examples each time. With EVERSTEP_TEST_SERVERS=production
only those tests run that touch rows or a broker: all others would do the same once more.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.contrib.contenttypes.management import create_contenttypes
from django.db.models.signals import post_migrate
from hypothesis import HealthCheck, settings

from tests.servers.broker import Broker, debian_redis, embedded
from tests.servers.postgresql import Postgresql

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a run with production's servers what uses none of them, and what serves pages to a real browser."""
    if django_settings.SERVERS != "production":
        return
    of_servers = [item for item in items if item.get_closest_marker("django_db") or item.get_closest_marker("servers")]
    chosen = [item for item in of_servers if not item.get_closest_marker("sqlite")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None) -> Iterator[None]:
    """Where pytest-django is about to make the test database: see to it that its server runs."""
    if django_settings.POSTGRESQL_FOLDER is None:
        yield
        return
    with Postgresql(django_settings.POSTGRESQL_FOLDER):
        yield


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """A server that is thrown away needs no tidying; threads of consumers may still be connected to it."""
    return django_settings.POSTGRESQL_FOLDER is not None


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> None:
    """Once the tables are there, emptying them after a test makes no permissions and content types anew.

    Nothing here asks for those, and making them took most of the time of each test.
    """
    post_migrate.disconnect(create_contenttypes)
    post_migrate.disconnect(dispatch_uid="django.contrib.auth.management.create_permissions")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """The broker that the settings name; without this fixture nobody listens there."""
    path = Path(django_settings.EVERSTEP_HOME) / "run" / "broker.sock"
    path.parent.mkdir(exist_ok=True)
    with Broker(debian_redis() if django_settings.SERVERS == "production" else embedded(), socket=path) as running:
        yield running
