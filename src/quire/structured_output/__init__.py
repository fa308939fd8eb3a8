"""STRUCTURED OUTPUT: from what a user asks of an output's form to the tokens that may come next.

    params ──> grammar.py ──> llguidance      a form as the library's grammar
    checker.py, checking_process.py           the front: is it one? found out in a process that may be killed
    grammars.py, walk.py                      the worker: compiled once, followed by each sequence
    vocabulary.py                             what tokens mean, told to both by the renderer

The library is imported at first use; nobody pays for it who does not ask for a form.
"""
