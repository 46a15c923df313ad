"""The differences between databases. Code elsewhere does not compare their names."""
