"""A bound that several tenants share without any of them being able to use all of it.

    [ A's part | B's part |        for whoever comes first        ]
     `-- half of the places, by weight --´

A tenant's part is kept free for it; the rest is anybody's. One tenant alone has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping


class SharedBound:
    """Counts places. Taken and free ones are always exactly `most`."""

    def __init__(self, most: int, weights: Mapping[str, float] | None = None) -> None:
        self.most = most
        self._weights = weights or {}
        self._parts = parts_of(most, self._weights)
        self._used: dict[str, int] = {}
        # what is taken, and what is kept free for others
        self._claimed = sum(self._parts.values())
        self.num_used = 0

    def used_by(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def has_room(self, tenant: str, amount: int) -> bool:
        return self._claimed + self._growth(tenant, amount) <= self.most

    def most_for(self, tenant: str) -> int:
        """Places that it could have if nobody else had anything."""
        return self.most - sum(self._parts.values()) + self._parts.get(tenant, 0)

    def take(self, tenant: str, amount: int) -> None:
        self._claimed += self._growth(tenant, amount)
        self.num_used += amount
        used = self._used.get(tenant, 0) + amount
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)

    def give_back(self, tenant: str, amount: int) -> None:
        self.take(tenant, -amount)

    def resized(self, most: int) -> SharedBound:
        """The same places are taken of another number of them."""
        bound = SharedBound(most, self._weights)
        for tenant, amount in self._used.items():
            bound.take(tenant, amount)
        return bound

    def _growth(self, tenant: str, amount: int) -> int:
        """By how much `amount` more for this tenant changes what is claimed."""
        used = self._used.get(tenant, 0)
        part = self._parts.get(tenant, 0)
        return max(part, used + amount) - max(part, used)


def parts_of(most: int, weights: Mapping[str, float]) -> dict[str, int]:
    """What is kept for each of several tenants."""
    total = sum(weights.values())
    return {name: int(most // 2 * weight / total) for name, weight in weights.items()} if len(weights) > 1 else {}
