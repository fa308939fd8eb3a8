"""The version of Quire, stated once: packaging, the command line and the server read it from here."""

__version__ = "0.1.0"
