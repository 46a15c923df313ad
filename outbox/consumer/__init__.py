"""The inbox, which remembers the messages that a consumer has handled."""
