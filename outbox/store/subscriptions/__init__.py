"""The rows that belong to subscriptions: leases, progress, parked messages, readers."""
