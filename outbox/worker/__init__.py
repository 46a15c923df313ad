"""One engine for every subscription: fetch, handle, settle."""
