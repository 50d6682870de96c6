"""Silence, fences and the breaker as a person sees them: in Chromium, from a real server. One test after the other."""

from __future__ import annotations

import os
import re

import pytest
from live_site import Site, opened
from looks import axe_complaints, breaker_page, complaints_of, drawn_looks, pages_with_breaker, visit, wrong_with
from playwright.sync_api import Browser, expect


def test_contact_is_a_mark_of_its_own_and_silence_ticks(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes")
        lost = page.locator("#nodes-table tr", has_text="gpu-15")
        expect(lost).to_contain_text("Unknown")
        expect(lost).to_contain_text("Lost silent for")
        suspect = page.locator("#nodes-table tr", has_text="gpu-12")
        expect(suspect).to_contain_text("Ready")
        expect(suspect).to_contain_text("Suspect silent for")
        page.locator('[data-switch="live"]').click()  # Nothing is fetched any more: the page itself must count on.
        silence = lost.locator(".silence")
        before = silence.inner_text()
        expect(silence).not_to_have_text(before)


def test_suspect_node_turns_unobserved_when_the_page_hears_nothing_more(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-12")
        page.locator('[data-switch="live"]').click()
        expect(page.locator(".page-head .title")).to_contain_text("Unobserved")
        expect(page.get_by_text("Suspect", exact=True)).to_be_hidden()


def test_quarantine_says_why_and_what_to_do(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-13")
        notice = page.get_by_role("region", name="Quarantine")
        expect(notice).to_contain_text("heard again in the same boot")
        expect(notice).to_contain_text("reboot the machine")
        expect(page.locator("#fence-actions-table")).to_contain_text("Contradicted")
        expect(page.locator("#fence-panel")).to_be_hidden()


def test_unconfirmed_generation_is_told_with_its_proof(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-17")
        notice = page.get_by_role("region", name="Unconfirmed")
        expect(notice).to_contain_text("has not said yet that generation 1 of clip-vit-l is gone")
        expect(notice).to_contain_text("lease ran out")


def test_job_with_an_unseen_node_says_that_it_trains_on(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["job that trains on unseen"])
        head = page.locator("#job-head")
        expect(head).to_contain_text("No contact with gpu-19 for")
        expect(head).to_contain_text("step 431 is known through gpu-18")
        expect(head).to_contain_text("2 to 4, in steps of 2")
        expect(head).to_contain_text("Shrunk: 2 of 4")
        expect(page.locator("#job")).to_contain_text("stepping 15 s")
        visit(page, "/nodes/gpu-19")
        expect(page.locator("#fence-panel")).to_contain_text("this machine is not powered off")
        expect(page.locator("#attest-form")).to_have_count(0)


def test_waiting_incident_names_what_would_bring_the_proof_and_leads_to_the_panel(
    chromium: Browser, site: Site
) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident that waits for a fence"])
        waiting = page.get_by_role("region", name="Waiting for a proof")
        expect(waiting).to_contain_text("gpu-15")
        expect(waiting.locator("[data-until]")).to_contain_text("min")
        witnesses = page.get_by_role("region", name="Witnesses").get_by_role("listitem")
        expect(witnesses).to_have_count(2)
        expect(witnesses.last).to_contain_text("Peers failed")
        evidence = page.locator("#timeline .entry-proof details")
        expect(evidence).to_contain_text("Control group empty")
        evidence.locator("summary").click()
        expect(evidence.locator("p")).to_contain_text("populated 0")
        waiting.get_by_role("link", name="attest that gpu-15 is powered off").click()
        page.wait_for_url("**/nodes/gpu-15#fence")
        expect(page.get_by_role("heading", name="Fence this node")).to_be_in_viewport()


def test_evidence_in_a_live_part_stays_unfolded(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident that waits for a fence"])
        fold = page.locator("#proof-1")
        fold.locator("summary").click()
        site.fleet("tell", site.ids["waiting_incident"], "2")
        expect(page.locator("#timeline")).to_contain_text("Told entry 2 of 2.")
        page.wait_for_timeout(700)  # The part with the proofs is fetched anew too.
        expect(fold.locator("p").first).to_be_visible()


def test_incident_out_of_sight_is_not_called_broken(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident out of sight"])
        expect(page.get_by_role("heading", level=1)).to_have_text("Generation 1 of reward-model is out of sight")
        expect(page.locator("#incident-head")).to_contain_text("Nothing is stopped.")
        expect(page.locator("#incident-head")).to_contain_text("Failed see the action")


def test_wrong_name_is_told_in_place_and_what_was_typed_is_kept(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-15")
        page.get_by_label("how do you know").fill("The BMC says off.")
        page.locator("#attest-confirm").fill("gpu-51")
        page.get_by_role("button", name="I attest").click()
        form = page.locator("#attest-form")
        expect(form.get_by_role("alert")).to_contain_text("gpu-51")
        expect(page.locator("#attest-confirm")).to_have_attribute("aria-invalid", "true")
        expect(page.locator("#attest-statement")).to_have_value("The BMC says off.")
        # Live updates of the page around it must not empty what is being typed.
        page.locator("#attest-statement").fill("The BMC says off; so do the LEDs.")
        with page.expect_response(lambda answer: "part=fence" in answer.url):
            page.locator("h1").click()
        page.wait_for_timeout(300)
        expect(page.locator("#attest-statement")).to_have_value("The BMC says off; so do the LEDs.")
        assert page.locator(".tone-good:visible").count() == 0


def test_provider_is_asked_by_name_and_listed(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-16")
        page.locator("#power-off-confirm").fill("gpu-16")
        page.get_by_role("button", name="Switch gpu-16 off").click()
        expect(page.get_by_role("status").first).to_contain_text("is asked to switch gpu-16 off")
        actions = page.locator("#fence-actions-table tbody tr")
        expect(actions).to_have_count(2)
        expect(actions.first).to_contain_text("Requested")
        page.locator("#power-off-confirm").fill("gpu-16")
        page.get_by_role("button", name="Switch gpu-16 off").click()
        expect(page.locator("#power-off-form").get_by_role("alert")).to_contain_text("is being fenced already")


def test_attestation_by_keyboard_is_taken_and_the_panel_goes(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-15")
        page.locator("#attest-statement").focus()
        page.keyboard.type("Power cord is out.")
        page.keyboard.press("Tab")
        page.keyboard.type("gpu-15")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="I attest")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("Attested")
        expect(page.locator("#fence-panel")).to_be_hidden()
        expect(page.locator("#fence-actions-table")).to_contain_text("Power cord is out.")
        visit(page, site.pages["incident that waits for a fence"])
        expect(page.locator("#timeline")).to_contain_text("operator attests that gpu-15 is powered off")
        expect(page.locator("#receipt")).to_contain_text("Attestation")


def test_form_without_its_token_attests_nothing(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-16")
        forged = page.request.post("/nodes/gpu-16", form={"ask": "attest", "confirm": "gpu-16", "statement": "off"})
        assert forged.status == 403
        visit(page, "/nodes/gpu-16")
        expect(page.locator("#fence-actions-table")).not_to_contain_text("Attestation")


def test_panel_goes_when_the_node_returns_without_reload(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-16")
        page.evaluate("window.sameDocument = true")
        expect(page.locator("#attest-form")).to_be_visible()
        site.fleet("return", "gpu-16", site.ids["silent"])
        expect(page.locator("#node-head")).to_contain_text("In contact")
        expect(page.locator("#fence-panel")).to_be_hidden()
        assert page.evaluate("window.sameDocument")


@pytest.mark.parametrize("kind", ["kill-agent", "partition", "server-down"])
def test_drill_shows_its_fields_and_exact_target_before_it_is_confirmed(
    chromium: Browser, site: Site, kind: str
) -> None:
    with opened(chromium, site) as page:
        complaints = complaints_of(page)
        visit(page, f"/drills?job={site.ids['steady']}")
        page.locator(f"#kind-{kind}").check()
        fields = page.locator("#drill-fields")
        expect(fields.locator("[name=fields_of]")).to_have_value(kind)
        expect(fields.get_by_label("Lasts")).to_have_value({"kill-agent": "90"}.get(kind, "30"))
        expect(fields.get_by_label("Recovered within")).to_have_count(1 if kind == "kill-agent" else 0)
        page.get_by_role("button", name="Trigger drill").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text({"server-down": "web, worker and beat"}.get(kind, "gpu-02, with rank 1"))
        expect(dialog).to_contain_text("tiny-gpt, generation 2")
        dialog.get_by_role("button", name="Leave it").click()
        expect(dialog).to_be_hidden()
        assert complaints == []


def test_drill_beside_one_that_is_not_over_is_refused_with_a_sentence(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, f"/drills?kind=server-down&job={site.ids['steady']}")
        page.get_by_role("button", name="Trigger drill").click()
        page.get_by_role("dialog").get_by_role("button", name="Take the server down").click()
        expect(page.get_by_role("alert").first).to_contain_text("drills break one node at a time")


def test_running_drill_shows_when_it_is_undone(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/drills")
        frozen = page.locator("#drills-table tr", has_text="freeze-node")
        expect(frozen).to_contain_text("is undone")
        expect(page.locator("#drills-table tr", has_text="server-down")).to_contain_text("events lost")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_list_of_the_apis_errors_is_readable_in_both_colours(chromium: Browser, site: Site, dark: bool) -> None:
    with opened(chromium, site, dark=dark, signed_in=False) as page:
        page.goto("/docs/errors#fence_refused")
        expect(page.locator("#fence_refused")).to_contain_text("status 409")
        assert axe_complaints(page) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(13, 16, 21)" if dark else "rgb(245, 246, 248)"
        )


def test_breaker_is_told_on_an_open_page_without_reload(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/jobs")
        expect(page.locator("#breaker")).to_be_hidden()
        page.evaluate("window.sameDocument = true")
        site.fleet("breaker")
        expect(page.locator("#breaker")).to_contain_text("Absence is not acted upon")
        expect(page.locator("#breaker")).to_contain_text("8 of 19 nodes fell silent at once")
        expect(page.locator("#announcer")).to_contain_text("breaker is open")
        assert page.evaluate("window.sameDocument")


def test_pages_with_an_open_breaker_are_sound(chromium: Browser, site: Site) -> None:
    looks = drawn_looks(pages_with_breaker(site), seed=int(os.environ.get("SEED") or 1))
    with opened(chromium, site) as page:
        assert wrong_with(page, looks) == {}


def test_control_plane_incident_shows_the_fleet_and_is_rearmed_by_hand(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/incidents?tab=open")
        row = page.locator("#incidents-table tbody tr", has_text="Control plane")
        expect(row).to_contain_text("Breaker open")
        row.get_by_role("link").first.click()
        page.wait_for_url(f"**{breaker_page(site)}")
        head = page.locator("#breaker-head")
        expect(head).to_contain_text("No job is stopped for it.")
        expect(head).to_contain_text("8 of these nodes are not in contact")
        assert page.locator(".dots .dot").count() == 19
        counted = re.compile(r"^\d+ in contact, 3 suspect, \d+ lost, 1 unobserved$")
        expect(page.locator(".dots")).to_have_attribute("aria-label", counted)
        site.fleet("contact")
        expect(head).to_contain_text("All of these nodes are in contact again")
        page.get_by_role("button", name="Re-arm").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Re-arm the breaker?")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Re-arm").click()
        dialog.get_by_role("button", name="Re-arm").click()
        expect(page.get_by_role("status").first).to_contain_text("Re-armed")
        expect(head).to_contain_text("by operator")
        expect(page.get_by_role("button", name="Re-arm")).to_have_count(0)
        visit(page, "/")
        expect(page.locator("#breaker")).to_be_hidden()
