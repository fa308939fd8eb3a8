"""How the ranks of an engine are laid out: which of them share each layer, a sequence's KV, or the layers of the model.

Rank 0 is the core's own process. The tensor coordinate counts fastest, then context, then stage, so that ranks with
much to say to each other are neighbours:

    tensor=2, context=1, pipeline=2      stage 0: ranks 0 and 1 share its layers      stage 1: ranks 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in each direction."""

    stage: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class RankGrid:
    """How many ranks there are in each direction."""

    # share each layer
    tensor: int = 1
    # share the KV of each sequence
    context: int = 1
    # share out the layers
    pipeline: int = 1
    # whole experts on each rank instead of a part of every one
    has_whole_experts: bool = False

    @property
    def size(self) -> int:
        return self.tensor * self.context * self.pipeline

    def place_of(self, rank: int) -> RankPlace:
        rest, tensor = divmod(rank, self.tensor)
        stage, context = divmod(rest, self.context)
        return RankPlace(stage, context, tensor)

    def rank_at(self, stage: int, context: int, tensor: int) -> int:
        return (stage * self.context + context) * self.tensor + tensor

    @property
    def firsts_of_stages(self) -> list[int]:
        return [self.rank_at(stage, 0, 0) for stage in range(self.pipeline)]

    @property
    def first_of_last_stage(self) -> int:
        """The rank whose answer to a step counts."""
        return self.firsts_of_stages[-1]

    def tensor_group(self, rank: int) -> list[int]:
        """Ranks that differ from this one in the tensor coordinate only, itself among them, in its order."""
        place = self.place_of(rank)
        return [self.rank_at(place.stage, place.context, tensor) for tensor in range(self.tensor)]

    def context_group(self, rank: int) -> list[int]:
        place = self.place_of(rank)
        return [self.rank_at(place.stage, context, place.tensor) for context in range(self.context)]

    def stage_group(self, rank: int) -> list[int]:
        place = self.place_of(rank)
        return [self.rank_at(stage, place.context, place.tensor) for stage in range(self.pipeline)]

    def groups_of(self, rank: int) -> dict[str, list[int]]:
        """By direction, those in which it is not alone."""
        groups = {
            "tensor": self.tensor_group(rank),
            "context": self.context_group(rank),
            "stage": self.stage_group(rank),
        }
        return {direction: members for direction, members in groups.items() if len(members) > 1}
