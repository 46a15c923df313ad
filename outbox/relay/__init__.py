"""The relay: one, or several side by side in a process."""
