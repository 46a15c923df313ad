"""What tests of an outbox need: private servers, a network that fails on demand."""
