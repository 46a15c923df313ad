"""Half messages, and what is pending of their transactions."""
