"""Several processes that answer HTTP in front of one engine (docs/server.md, "Several processes")."""
