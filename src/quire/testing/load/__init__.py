"""Loads a server of its own and judges what it did: `python -m quire.testing.load NAME`. One file a kind of load."""
