"""A consumer whose effects can be counted."""

import uuid
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Inbox, Message


def billing(engine: Engine) -> Inbox:
    """The inbox of the consumer `billing`, whose effects are rows of a table that is made here."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (what text NOT NULL)"))
    return Inbox(engine, "billing")


def take_effect(handle: Any, what: str = "booked") -> None:
    """What a handler is for."""
    handle.execute(text("INSERT INTO effect (what) VALUES (:what)"), {"what": what})


def effects(engine: Engine) -> list[str]:
    """What has taken effect, each as often as it did."""
    with engine.connect() as connection:
        return sorted(connection.scalars(text("SELECT what FROM effect")))


def handle_once(engine: Engine, inbox: Inbox, message: Message | uuid.UUID | str, what: str = "booked") -> bool:
    """One delivery, as a consumer handles it."""
    with Session(engine) as session, session.begin():
        first = inbox.once(session, message)
        if first:
            take_effect(session, what)
    return first
