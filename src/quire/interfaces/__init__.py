"""What users touch: the Python classes, the command line and the HTTP server."""
