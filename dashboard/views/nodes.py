"""Nodes: the list, and one node with its GPUs."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from dashboard.views.page import present, signed_in
from recovery import queries
from recovery.queries.nodes import STALE_GPU_S, contact_limit_s

LIMITS = {"contact_limit_s": contact_limit_s(), "gpu_limit_s": STALE_GPU_S}
"""After which a page greys a value by itself, also when nothing tells it anything any more."""


@signed_in
@require_safe
def nodes(request: HttpRequest) -> HttpResponse:
    found = queries.list_nodes()
    # What cannot be seen comes first: it is what somebody must look at.
    unseen = [node for node in found if not node.connected]
    context = {"nodes": [*unseen, *(node for node in found if node.connected)], "unseen": unseen} | LIMITS
    return present(request, "nodes", context, parts={"nodes": "_nodes.html"})


@signed_in
@require_safe
def node(request: HttpRequest, name: str) -> HttpResponse:
    context = {"node": queries.get_node(name)} | LIMITS
    return present(request, "node", context, parts={"node": "_node.html"})
