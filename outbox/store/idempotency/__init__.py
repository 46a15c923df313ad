"""What is written once: the first insert wins."""
