"""Endpoints of whoever runs the server."""
