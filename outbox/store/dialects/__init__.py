"""What each database has to say; nothing else compares their names."""
