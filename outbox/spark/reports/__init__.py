"""Reports over the outbox as DataFrames: of the source, of an archive, or of anything with the same columns."""
