"""What outlives the process: one database."""
