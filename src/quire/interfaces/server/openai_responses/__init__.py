"""OpenAI's Responses API: `POST /v1/responses`, and what is kept of it.

fields.py   what may be asked        items.py   the items of a conversation, and the chat that they are
making.py   a request on its way     answer.py  output items and events
stored.py   the table                endpoints.py
"""
