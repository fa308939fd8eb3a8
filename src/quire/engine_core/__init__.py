"""ENGINE CORE: a deterministic state machine. No torch, no clock of its own, no randomness of its own."""
