"""Loads a server of its own and judges what it did: `python -m tests.support.load NAME`. One file a kind of load."""
