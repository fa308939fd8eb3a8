"""/v1/batches: files of requests that are answered when there is room.

`quire run-batch` does the same without a server: what both share (endpoint_calls, input_lines, line_run, results) knows
nothing of HTTP, of the storage, or of clients' files.
"""
