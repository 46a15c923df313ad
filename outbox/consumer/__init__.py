"""For those who receive: what was handled already."""
