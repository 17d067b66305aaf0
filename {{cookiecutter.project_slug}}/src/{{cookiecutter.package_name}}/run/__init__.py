"""A run: its folder, what is written into it, how it is stopped and how it goes on."""
