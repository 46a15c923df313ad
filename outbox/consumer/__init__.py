"""The inbox, by which consumers know what they have handled already."""
