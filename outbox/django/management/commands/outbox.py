"""`manage.py outbox …`: the command line of the outbox, on a database of Django's settings."""

from __future__ import annotations

import os
from argparse import REMAINDER, ArgumentParser

from django.core.management.base import BaseCommand
from django.db import connections

from outbox.cli import main
from outbox.django.databases import url_of
from outbox.model.command import Commands


class Command(BaseCommand):
    """Passes everything behind `outbox` on, for example `relay --to nats://localhost:4222`."""

    help = "Run the command line of the outbox on the database 'default', or on that of OUTBOX_DATABASE."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take everything."""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep Django's own options away from those of the outbox."""
        self.handle(arguments=argv[2:])

    def handle(self, *_: object, arguments: list[str], **__: object) -> None:
        """Run the command, and exit with its code."""
        os.environ.setdefault("OUTBOX_DATABASE", url_of(connections["default"]).render_as_string(hide_password=False))
        main(arguments, prog_name="manage.py outbox", obj=Commands(program=("python", "manage.py", "outbox")))
