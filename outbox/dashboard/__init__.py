"""The dashboard: pages about an outbox for people without a shell."""
