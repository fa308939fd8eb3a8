"""Decoding methods out of three verbs (3.5.2): fork, append, free."""
