"""The caller's transaction: finding it, appending to it, noticing its commit."""
