"""The settings of the shop."""

import os
from pathlib import Path

SECRET_KEY = "only for an example"  # noqa: S105
DEBUG = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.views"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["shop", "outbox.django"]

if name := os.environ.get("PGDATABASE"):
    DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": name}}
else:
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path("shop.sqlite3").absolute())}}
