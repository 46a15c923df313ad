"""The log: appended to, read by position."""
