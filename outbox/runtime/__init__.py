"""Tools that know nothing of messages: clock, wake-up, pauses, turns, fail points, the event loop."""
