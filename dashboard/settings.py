"""Django settings: embedded defaults, overridden by the environment variables of `dashboard.env`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from dashboard.env import env

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = env.secret_key
DEBUG = env.debug
ALLOWED_HOSTS = env.allowed_hosts

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "django_htmx",
    "channels",
    "recovery",
    "dashboard",
]

MIDDLEWARE = [
    "dashboard.api.problems.ProblemMiddleware",
    "dashboard.middleware.ContentPolicy",
    "dashboard.known_hosts.KnownHosts",
    "django.middleware.security.SecurityMiddleware",
    "dashboard.middleware.StaticFiles",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "dashboard.urls"
ASGI_APPLICATION = "dashboard.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]


def _database(url: str) -> dict[str, Any]:
    """SQLite in the home folder, or PostgreSQL by URL."""
    if not url:
        env.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "CONN_MAX_AGE": 60,
            "NAME": env.home / "everstep.sqlite3",
            "OPTIONS": {
                # IMMEDIATE: in WAL mode a transaction that reads first and then writes fails at once otherwise.
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                # FULL: a generation number that was given out must not be forgotten by a power cut.
                "init_command": "PRAGMA journal_mode=WAL;PRAGMA synchronous=FULL;PRAGMA cache_size=-32000",
            },
            "TEST": {"NAME": env.home / "test.sqlite3"},
        }
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),  # %2Frun%2Fpostgresql is a socket folder
        "PORT": parts.port or "",
        "OPTIONS": {
            # A server that vanished must fail a query, not hold up its thread until the kernel gives up.
            "connect_timeout": 5,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 15000,
            # A process of ours that stands still must not hold up the others by what it has locked; and what an agent
            # was told is stored, it forgets, so that a server must not lose it, whatever its own default is.
            "options": "-c idle_in_transaction_session_timeout=15s -c lock_timeout=15s -c synchronous_commit=on",
            **dict(parse_qsl(parts.query, keep_blank_values=True)),  # what libpq knows, for example sslmode=verify-full
        },
    }


DATABASES = {"default": _database(env.database_url)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [env.redis_url], "prefix": "everstep-layer"},
    },
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"

SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

STATIC_URL = "static/"
# Static files are served from where they lie, found once at start: no collecting between an update and a restart.
WHITENOISE_USE_FINDERS = True
WHITENOISE_ALLOW_ALL_ORIGINS = False

EVERSTEP_HOME = str(env.home)
EVERSTEP_REDIS_URL = env.redis_url
EVERSTEP_SUSPECT_AFTER_S = env.suspect_after_s
EVERSTEP_LOST_AFTER_S = env.lost_after_s
EVERSTEP_FENCE_COMMAND = env.fence_command
EVERSTEP_FENCE_TIMEOUT_S = env.fence_timeout_s
EVERSTEP_FENCE_AUTO = env.fence_auto
EVERSTEP_FAILPOINTS = str(env.failpoints or "")


def _celery_broker(url: str) -> str:
    """Celery names Unix sockets differently from redis-py."""
    return url.replace("unix://", "redis+socket://", 1) if url.startswith("unix://") else url


CELERY_BROKER_URL = _celery_broker(env.redis_url)
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Longer than any task, so that nothing is delivered twice by design; both sweep options are needed, since kombu
    # multiplies them (its defaults look for lost messages every 100 s only).
    "visibility_timeout": 300,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    "socket_timeout": 30,
    "socket_keepalive": not env.redis_url.startswith("unix://"),
    "health_check_interval": 15,
    "global_keyprefix": "everstep-celery:",
}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# A broker that refuses writes, since it is full, is one that is away: the worker must outlive it, for it sweeps.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_TIME_LIMIT = 120
CELERY_TASK_SOFT_TIME_LIMIT = 90
CELERY_TASK_DEFAULT_QUEUE = "default"
CELERY_TASK_ROUTES = {"recovery.tasks.*": {"queue": "recovery"}}
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_MAX_TASKS_PER_CHILD = 5000
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BEAT_SCHEDULE = {
    # Expires: beats that piled up while no worker was there must not all run.
    "sweep": {"task": "recovery.tasks.sweep", "schedule": 2.0, "options": {"expires": 2}},
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
}
