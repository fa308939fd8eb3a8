"""Faults that are done to a real server on purpose, and what became of its requests.

Three programs in one: live streams that record what they hear (streams.py), a hand that breaks things (cases.py), and a
checker that knows neither and says whether what was heard was right (history.py).
"""
