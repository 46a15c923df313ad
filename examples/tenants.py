"""A database for each tenant, or for each shard: an outbox in every one of them, and one relay process for all.

    python tenants.py acme globex acme
    outbox relay --database sqlite:///acme.db --database sqlite:///globex.db --to stdout: --until-empty

A database that is down holds up its own messages, and nobody else's. Tenants in schemas of one PostgreSQL database
share an engine: `Outbox(engine, schema="acme")`, and `outbox relay --schema acme --schema globex`.
"""

import sys
from functools import cache

from sqlalchemy import Column, Integer, MetaData, String, Table, insert

from outbox import Outbox, create_engine
from outbox.migrate import upgrade

DATABASES = {"acme": "sqlite:///acme.db", "globex": "sqlite:///globex.db"}

metadata = MetaData()
orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("customer", String))


@cache
def outbox_of(tenant: str) -> Outbox:
    """The outbox beside a tenant's orders, made when it is first asked for."""
    engine = create_engine(DATABASES[tenant])
    upgrade(engine)
    metadata.create_all(engine)
    return Outbox(engine)


def place_order(tenant: str, customer: str) -> None:
    """Take a new order, and tell everybody whose it is."""
    outbox = outbox_of(tenant)
    with outbox.begin() as session:
        session.execute(insert(orders).values(customer=customer))
        outbox.send(session, "orders", {"customer": customer}, headers={"tenant": tenant})


if __name__ == "__main__":
    for tenant in sys.argv[1:] or DATABASES:
        place_order(tenant, "ann")
