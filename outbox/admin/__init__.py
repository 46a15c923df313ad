"""What an operator orders, for whoever asks for it."""
