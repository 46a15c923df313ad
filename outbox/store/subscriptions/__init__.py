"""What is kept of each subscription: leases, progress, parked messages, acks, readers."""
