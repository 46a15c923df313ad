"""Rows that are written once, of which the first insert wins: dedup keys and the inbox."""
