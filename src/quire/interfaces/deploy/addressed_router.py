"""How Ray Serve brings a call to the copy that the front has chosen: the session of the call is the copy's name.

Serve takes this module to the process of the front as text, so what is kept lies in another one (roster.py). Loaded
where Ray is.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from quire.interfaces.deploy import roster


class AddressedRouter(RequestRouter):
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        roster.ROSTER.change(frozenset(replica.replica_id.unique_id for replica in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named one; any, where it has gone meanwhile."""
        name = "" if pending_request is None else pending_request.metadata.session_id
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]
