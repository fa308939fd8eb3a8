"""Ollama's API below `/api`: chats, texts, vectors, and what it says of models.

fields.py    what may be asked, and the chat or text that it is      answer.py   lines of JSON, errors
models.py    models, as its clients list them                       endpoints.py
"""
