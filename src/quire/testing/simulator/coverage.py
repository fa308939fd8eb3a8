"""What workloads have brought about: the transitions in a request's life that are worth counting."""

from __future__ import annotations

from quire.testing.simulator.workload import Workload

# Each of these happens in the default workloads often enough that a mistake in it would be met.
TRANSITIONS = (
    "requests",
    "refusals",
    "failures",
    "mishaps",
    "aborts",
    "extensions",
    "prefix hits",
    "preempted by recomputation",
    "preempted by swapping",
    "requests resumed",
    "beams forked",
    "beams dropped",
    "blocks copied",
    "blocks evicted",
    "blocks freed by a window",
    "blocks swapped out",
    "blocks swapped in",
    "sequences kept",
    "kept sequences continued",
    "kept sequences evicted",
    "prefixes pinned",
    "hits of pinned prefixes",
    "steps decided ahead",
    "tokens past an end",
    "preempted in flight",
    "aborted in flight",
    "rows given away",
    "drafts accepted",
    "drafts rejected",
    "drafts verified in chunks",
    "prefixes fetched",
    "blocks stored for others",
    "outputs continued",
    "checkpoints of states",
    "checkpoints found",
)
# They need what few workloads have: a chat, or a pinned prefix, of a model with states.
RARE_TRANSITIONS = ("ends of answers found", "hits of pinned states")

_STATISTICS = {
    "tokens past an end": "num_dropped_tokens_total",
    "blocks stored for others": "stored_blocks_total",
    "preempted by recomputation": "num_preemptions_by_recompute_total",
    "preempted by swapping": "num_preemptions_by_swap_total",
    "blocks copied": "num_blocks_copied_total",
    "blocks evicted": "num_blocks_evicted_total",
    "blocks swapped out": "swapped_out_blocks_total",
    "blocks swapped in": "swapped_in_blocks_total",
}


def counts_of(workload: Workload) -> dict[str, int]:
    """How often each transition was taken."""
    checked = workload.checked
    statistics = workload.core.core.statistics()
    counts = checked.counts + checked.decisions.counts + checked.kept.counts
    counts.update({name: int(statistics[statistic]) for name, statistic in _STATISTICS.items()})
    work = workload.core.executor.work
    counts["checkpoints of states"] = int(statistics.get("num_state_checkpoints_made_total", 0))
    has_states = workload.core.manager.num_state_blocks > 0
    counts["checkpoints found"] = counts["prefix hits"] * has_states
    counts["hits of pinned states"] = counts["hits of pinned prefixes"] * has_states
    counts["steps decided ahead"] = work.num_steps * workload.core.is_async
    counts["drafts accepted"], counts["drafts rejected"] = work.num_accepted_tokens, work.num_rejected_tokens
    counts["drafts verified in chunks"] = work.num_partial_verifications
    return {name: counts[name] for name in (*TRANSITIONS, *RARE_TRANSITIONS)}
