"""Hooks: what looks at requests and answers before anybody else does, and judges (docs/hooks.md).

loading.py          names to hooks
calls.py            threads in which their methods run, with an end to patience
judging.py          what they say of a sequence, together
guarded_stream.py   one request: what is held, what is shown
guarded_client.py   the engine client of those who are guarded
"""
