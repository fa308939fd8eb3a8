"""GET /v1/admin/tenants: what each tenant uses, in all processes together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from quire.interfaces.gateway.access.waiting_room import TenantReport
from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer

# of a tenant's report: what only grows
TENANT_COUNTS = ("num_accepted", "num_rejected", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens")

router = APIRouter(dependencies=[Depends(admins_only)])


class TenantList(msgspec.Struct, kw_only=True):
    """All tenants."""

    object: Annotated[str, only("list")] = "list"
    data: list[TenantReport]


@router.get("/v1/admin/tenants", openapi_extra=described(answer=TenantList))
async def tenants(request: Request) -> Response:
    """What each tenant uses now, and has used since the start."""
    others = await request.app.state.siblings.ask("tenants")
    return json_answer(TenantList(data=reports_of_all(request.app.state.services.room.report(), others)))


def reports_of_all(own: list[TenantReport], others: Iterable[list[dict[str, Any]]]) -> list[TenantReport]:
    """What each tenant uses in all processes. The queue is one, and each process sees the whole of it."""
    by_name = {report.name: report for report in own}
    for report in (one for reports in others for one in reports):
        before = by_name.get(report["name"])
        if before is not None:
            sums = {name: getattr(before, name) + report[name] for name in ("num_requests", *TENANT_COUNTS)}
            by_name[before.name] = replace(before, **sums)
    return list(by_name.values())
