"""Responses that are kept."""
