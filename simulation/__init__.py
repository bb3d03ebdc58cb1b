"""Virtual time: real sessions and the real round machine without sockets or sleeps."""
