"""What may stand before the name of a metric. Light, because the command line reads it for `--help`."""

OWN_PREFIX = "quire:"
VLLM_PREFIX = "vllm:"
PREFIXES = (OWN_PREFIX, VLLM_PREFIX)
