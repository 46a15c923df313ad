"""Who watches: values for what happens in the library, and those who listen."""
