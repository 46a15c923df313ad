"""All SQL of the library: for the log, its subscriptions, their leases, progress and parked messages."""
