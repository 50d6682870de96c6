"""Nodes: the list, and one node with its GPUs and the panel that fences it."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_safe

from dashboard.views.page import present, signed_in
from recovery import fencing, queries
from recovery.domain.silence import Contact
from recovery.errors import FenceRefused, NotConfirmed
from recovery.queries import JobDetail, NodeDetail
from recovery.queries.nodes import STALE_GPU_S, contact_limit_s

PARTS = {"head": "_node_head.html", "fence": "_fence_panel.html", "node": "_node.html"}
REFUSED = 409


def _limits() -> dict[str, float]:
    """After which a page greys a value by itself, also when nothing tells it anything any more."""
    return {"contact_limit_s": contact_limit_s(), "gpu_limit_s": STALE_GPU_S}


@dataclass(frozen=True, kw_only=True)
class FenceForm:
    """What was typed into one of the panel's forms, and why it was not taken."""

    confirm: str = ""
    statement: str = ""
    error: str = ""
    unconfirmed: bool = False
    """The error is about the name that was to be typed."""


@signed_in
@require_safe
def nodes(request: HttpRequest) -> HttpResponse:
    found = queries.list_nodes()
    # What cannot be seen comes first: it is what somebody must look at.
    unseen = [node for node in found if not node.connected]
    context = {"nodes": [*unseen, *(node for node in found if node.connected)], "unseen": unseen} | _limits()
    return present(request, "nodes", context, parts={"nodes": "_nodes.html"})


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def node(request: HttpRequest, name: str) -> HttpResponse:
    if request.method == "POST":
        return _ask(request, name)
    return _show(request, name)


def _show(request: HttpRequest, name: str, *, status: int = 200, **forms: FenceForm) -> HttpResponse:
    seen = queries.get_node(name)
    context = {
        "node": seen,
        "show_fence": bool(seen.unproven) and seen.contact is not Contact.SEEN,
        "stepping": _stepping_on(seen),
        "attest": FenceForm(),
        "power_off": FenceForm(),
    }
    return present(request, "node", context | forms | _limits(), parts=PARTS, status=status)


def _stepping_on(node: NodeDetail) -> list[JobDetail]:
    """Jobs whose ranks on this node are known to step, though the node itself cannot be seen."""
    held = {share.job for share in node.unproven}
    jobs = [queries.get_job(job) for job in sorted(held)] if node.contact is not Contact.SEEN else []
    return [job for job in jobs if any(one.node == node.name and one.trains_on for one in job.unseen)]


def _ask(request: HttpRequest, name: str) -> HttpResponse:
    """Attest that the node is off, or have it switched off. What is refused comes back as it was typed."""
    ask = "attest" if request.POST.get("ask") == "attest" else "power_off"
    confirm, statement = request.POST.get("confirm", "").strip(), request.POST.get("statement", "").strip()
    by = request.user.get_username()
    try:
        if ask == "attest":
            fencing.attest_power_off(name, confirm=confirm, statement=statement, by=by)
            messages.success(request, f"Attested: {name} is powered off. What waited for it goes on.")
        else:
            fencing.request_fence(name, confirm=confirm, by=by)
            messages.success(request, f"The fence provider is asked to switch {name} off. Its answer is listed below.")
    except (NotConfirmed, FenceRefused) as refused:
        unconfirmed = isinstance(refused, NotConfirmed)
        form = FenceForm(confirm=confirm, statement=statement, error=str(refused), unconfirmed=unconfirmed)
        return _show(request, name, status=REFUSED, **{ask: form})
    return redirect("node", name)
