"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

fields.py   what may be asked, and the chat that it is      blocks.py   messages made of blocks
answer.py   content blocks, events, errors                  endpoints.py
"""
