"""All SQL of the library: the log, its subscriptions, their leases, progress and parked messages."""
