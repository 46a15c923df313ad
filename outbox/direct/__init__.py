"""Direct sends: the writer itself sends its messages, right after its commit."""
