"""Operations on the tables for an operator: status, purge, check, restore."""
