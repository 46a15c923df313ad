"""Orders over HTTP with Django: the message joins the transaction of the request.

    python manage.py migrate
    python manage.py outbox relay --to stdout: &
    python manage.py runserver

The data is in `shop.sqlite3`, or in PostgreSQL if PGDATABASE names a database.
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
