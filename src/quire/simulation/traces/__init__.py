"""Traces: files of arrivals in the forms in which others publish them, and lengths that ship with Quire."""
