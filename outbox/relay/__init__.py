"""The relay, and any number of them side by side."""
