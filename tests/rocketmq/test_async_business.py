"""An async business transaction takes part by `run_sync`, as the error about it says."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Outbox
from outbox.rocketmq import TransactionResolution
from tests.rocketmq.parts import arrived, producer_of
from tests.support.handles import awaited


@pytest.mark.parametrize("verb", ["join", "commit"])
def test_what_the_error_says_works(engine, verb):
    outbox = Outbox(engine)
    producer = producer_of(outbox)
    transaction = producer.begin_transaction(verdict=verb)
    transaction.send("orders", "1")

    async def business():
        async with AsyncSession(awaited(engine)) as session:
            with pytest.raises(TypeError, match=rf"await handle.run_sync\(transaction.{verb}\)"):
                getattr(transaction, verb)(session)
            await session.run_sync(getattr(transaction, verb))
            before = arrived(outbox) if verb == "join" and engine.dialect.name == "postgresql" else []
            await session.commit()
            return before

    before = asyncio.run(business())
    after, resolution = arrived(outbox), transaction.resolution
    producer.shutdown()

    assert (before, after, resolution) == ([], ["1"], TransactionResolution.COMMIT)
