"""What can be seen of a running engine: logs, metrics, start-up phases."""
