"""Tenants: who may come in, as whom, and when."""
