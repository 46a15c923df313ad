"""The commands of an operator, as functions."""
