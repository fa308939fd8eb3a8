"""Finds tool calls and reasoning in a model's answer while it arrives. The formats stand in `tool_parsers` and
`reasoning_parsers`, a file each; what is common to all of them is here."""
