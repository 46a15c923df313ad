"""The watchers: values for events in the library, and their listeners."""
