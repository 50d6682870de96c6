"""Claims: who does a piece of periodic work right now."""

from __future__ import annotations

from django.db import models


class Claim(models.Model):
    """Held until it runs out; taken by a conditional update. The word lease is kept for ranks."""

    name = models.CharField(primary_key=True, max_length=60)
    holder = models.CharField(max_length=120)
    until = models.FloatField()
    last_done_at = models.FloatField(null=True)
