"""Senders that come with the library: one file a destination, its driver imported only there."""
