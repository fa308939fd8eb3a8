"""llama.cpp's own endpoints: `/completion`, `/infill`, `/props`, `/slots`, `/apply-template`.

fields.py   what may be asked, in OpenAI's words      answer.py   events and the whole answer      endpoints.py
"""
