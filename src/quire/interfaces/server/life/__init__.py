"""The server's and its engine's life: start, watch, restart, end."""
