"""OpenAI's endpoints, and what all generating endpoints share."""
