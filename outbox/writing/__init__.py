"""The caller's transaction: find, append, notice the commit."""
