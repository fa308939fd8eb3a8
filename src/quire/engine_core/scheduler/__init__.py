"""SCHEDULER: who computes how many tokens in the next step."""
