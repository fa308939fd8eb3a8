"""Sockets, connections and HTTP itself: uvicorn, with limits of our own."""
