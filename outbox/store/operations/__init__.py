"""What an operator asks of the tables: status, purge, check, restore."""
