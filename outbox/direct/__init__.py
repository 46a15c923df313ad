"""Direct sends: by the writer itself, right after its commit."""
