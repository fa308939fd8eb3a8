"""Hooks: what looks at requests and answers before anybody else does, and judges (docs/hooks.md).

loading.py          names to hooks
calls.py            threads in which their methods run, with an end to patience
hook_process.py     a hook in a process of its own
first_part.py       what they see of a list that grows
unhooked.py         what they do not see
judging.py          what they say, together
guarded_stream.py   one request: what is held, what is shown
guarded_client.py   the engine client of those who are guarded
judged_calls.py     calls of tools in an answer
engine.py           what hooks may ask of the engine
"""
