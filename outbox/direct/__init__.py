"""Direct sends: a writer sends its messages right after the commit."""
