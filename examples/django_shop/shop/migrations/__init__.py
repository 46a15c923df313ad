"""A shop."""
