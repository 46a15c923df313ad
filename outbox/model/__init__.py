"""Values: the message, its limits and encoding, positions, verdicts. Nothing here knows a database."""
