"""The KV cache in one sentence, for somebody who has never seen a block map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.observability.decisions import plural

_WAITS = {
    "memory": "memory",
    "rows": "a place in the batch",
    "turn": "the next step",
    "input": "more of its prompt",
    "blocks": "blocks from elsewhere",
}


def summary_of(observed: Mapping[str, Any]) -> str:
    """From what the core says of its blocks: how much is used, what is shared, what waits."""
    total = observed["num_blocks"]
    counts = observed["counts_by_state"]
    in_use = total - counts["free"] - counts["cached"]
    share = "0 %" if not in_use else "under 1 %" if 100 * in_use < total else f"{100 * in_use // total} %"
    parts = [f"{share} of {plural(total, 'block')} {_is(total)} in use"]
    if counts["shared"]:
        sharers = plural(observed["num_sharing_requests"], "conversation")
        parts.append(f"{counts['shared']:,} of them {_is(counts['shared'])} shared by {sharers}")
    if counts["cached"]:
        parts.append(f"{plural(counts['cached'], 'block')} of earlier prompts {_is(counts['cached'])} kept for reuse")
    if observed["num_host_blocks_used"]:
        used = observed["num_host_blocks_used"]
        parts.append(f"{plural(used, 'block')} {_is(used)} in swap space")
    waits = [
        f"{plural(count, 'request')} {'waits' if count == 1 else 'wait'} for {_WAITS[what]}"
        for what, count in observed["waiting_for"].items()
        if count
    ]
    return "; ".join([*parts, *(waits or ["nothing waits"])]) + "."


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
