"""What workloads have brought about: the transitions in a request's life that are worth counting."""

from __future__ import annotations

from quire.testing.workload import Workload

# Each of these happens in the default workloads often enough that a mistake in it would be met.
TRANSITIONS = (
    "requests",
    "refusals",
    "failures",
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
)

_STATISTICS = {
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
    return {name: counts[name] for name in TRANSITIONS}
