"""PROCESSES: how one process of Quire starts, watches and outlives another, or does not."""
