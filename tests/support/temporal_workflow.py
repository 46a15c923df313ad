"""A workflow of Temporal, which its worker imports a second time, into a sandbox."""

from temporalio import workflow


@workflow.defn(name="PlaceOrder")
class PlaceOrder:
    """Places an order."""

    @workflow.run
    async def run(self, order: dict[str, int]) -> int:
        """Return the order's id."""
        return order["id"]
