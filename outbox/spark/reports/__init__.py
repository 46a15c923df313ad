"""Reports over DataFrames of the outbox: from the source, from an archive, or from anything with the same columns."""
