"""ROUTING: which of several copies of an engine gets a request. Pure: numbers in, a number out; no I/O, no clock.

Used by the front of several engine cores (engine_client/replica_link.py); deployments and simulations can use it, too.
"""

from quire.routing.policies import POLICIES, LeastLoaded, LeastTime, Policy, RoundRobin
from quire.routing.prefixes import HeldPrefixes
from quire.routing.router import Choice, Replica, Router

__all__ = [
    "POLICIES",
    "Choice",
    "HeldPrefixes",
    "LeastLoaded",
    "LeastTime",
    "Policy",
    "Replica",
    "RoundRobin",
    "Router",
]
