"""What holds for responses in the background, for those that make them and those that keep them."""

UNFINISHED = ("queued", "in_progress")
# So long after its last beat the server that made one is taken for gone.
BEAT_SECONDS_LOST = 60.0
