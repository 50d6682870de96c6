"""Addresses of the pages."""

from __future__ import annotations

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from dashboard.views import drills, incidents, jobs, nodes, overview

urlpatterns = [
    path("login", LoginView.as_view(template_name="login.html", redirect_authenticated_user=True), name="login"),
    path("logout", LogoutView.as_view(), name="logout"),
    path("", overview.overview, name="overview"),
    path("banner", overview.banner, name="banner"),
    path("nodes", nodes.nodes, name="nodes"),
    path("nodes/<str:name>", nodes.node, name="node"),
    path("jobs", jobs.jobs, name="jobs"),
    path("jobs/<str:job_id>", jobs.job, name="job"),
    path("jobs/<str:job_id>/stop", jobs.stop, name="stop_job"),
    path("jobs/<str:job_id>/checkpoint", jobs.checkpoint, name="checkpoint_job"),
    path("incidents", incidents.incidents, name="incidents"),
    path("incidents/<str:incident_id>", incidents.incident, name="incident"),
    path("incidents/<str:incident_id>/actions", incidents.act, name="act_on_incident"),
    path("drills", drills.drills, name="drills"),
]
