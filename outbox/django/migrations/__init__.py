"""The tables of the outbox, as migrations of Django."""
