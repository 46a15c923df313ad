"""What the fronts of an outbox have in common: topics, consumer groups and clients, as rows."""
