"""The Django project and web edge. Importing it makes the Celery application current: tasks reach its broker."""

from dashboard.celery import app as celery_app

__all__ = ["celery_app"]
