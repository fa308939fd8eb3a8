"""Models: a file named after the `model_type` of config.json, each written as its author would write it (4.3.1)."""
