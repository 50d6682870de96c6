"""What a prepared generation must show before it may run; shared by a job's first launch and by recovery."""

from __future__ import annotations

from collections.abc import Sequence

from recovery.domain.generations import GenerationView, ShareView


def fingerprint_difference(shares: Sequence[ShareView]) -> str:
    """Name the first part in which the nodes' views of the job differ; empty if they agree."""
    if len({share.fingerprint for share in shares}) <= 1:
        return ""
    first = shares[0]
    for share in shares[1:]:
        for part in sorted(set(first.fingerprint_parts) | set(share.fingerprint_parts)):
            here, there = first.fingerprint_parts.get(part), share.fingerprint_parts.get(part)
            if here != there:
                return f"{part} is {here} on {first.node} and {there} on {share.node}"
    return f"the fingerprints of {first.node} and another node differ"


def endpoint_port(generation: GenerationView) -> int | None:
    """The port that the agent of node rank 0 reserved for the rendezvous."""
    master = generation.plan.nodes[0]
    return next((share.master_port for share in generation.shares if share.node == master), None)
