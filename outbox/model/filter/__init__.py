"""Filters: conditions on a message's headers, tags, key and topic, in RocketMQ's SQL92 and tag expressions."""
