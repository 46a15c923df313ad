"""A source that takes filters, as Spark's documentation shows it; workers have to be able to import it."""

from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, InputPartition


class Numbers(DataSource):
    """The ids 0 to 9, of which `id = n` is taken by the source itself."""

    @classmethod
    def name(cls):
        """What stands in `format(…)`."""
        return "numbers"

    def schema(self):
        """One column."""
        return "id long"

    def reader(self, schema):
        """One read."""
        return NumbersReader()


class NumbersReader(DataSourceReader):
    """Remembers which id is wanted, as every source with `pushFilters` has to."""

    wanted = None

    def pushFilters(self, filters):  # noqa: N802
        """Take `id = n`, and hand the others back."""
        for each in filters:
            if isinstance(each, EqualTo) and each.attribute == ("id",):
                self.wanted = each.value
            else:
                yield each

    def partitions(self):
        """One."""
        return [InputPartition(0)]

    def read(self, partition):
        """The ids that are wanted."""
        return iter([(n,) for n in range(10) if self.wanted in (None, n)])
