"""The HTTP application of one engine. What a team needs in front of it is the gateway (`interfaces/gateway/`)."""
