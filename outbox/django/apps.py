"""The app of Django's settings."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):
    """Brings the migration and the command; there are no models."""

    name = "outbox.django"
    label = "outbox"
    verbose_name = "Outbox"
