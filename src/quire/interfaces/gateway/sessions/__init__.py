"""/v1/sessions: conversations whose tokens and blocks stay in the engine between their turns."""
