"""The pages as a person sees them: in Chromium, from a real server, with a fleet in every state that can be shown."""

from __future__ import annotations

import os
import re
import time

import pytest
from live_site import PASSWORD, USER, Site, log_in, opened
from looks import Look, all_pages, drawn_looks, restyle, visit, wait_until_live, wrong_with
from playwright.sync_api import Browser, Page, Route, expect

TIMELINE_ROWS = "#timeline [data-seq]"


def shown_seqs(page: Page) -> list[int]:
    return page.eval_on_selector_all(TIMELINE_ROWS, "rows => rows.map(row => Number(row.dataset.seq))")


def test_every_page_is_sound(chromium: Browser, site: Site) -> None:
    looks = drawn_looks(all_pages(site), seed=int(os.environ.get("SEED") or 1))
    with opened(chromium, site) as page:
        assert wrong_with(page, looks) == {}
    with opened(chromium, site, signed_in=False) as page:
        assert wrong_with(page, [Look("login", "/login", dark=True)]) == {}


def test_pages_and_parts_need_a_login(chromium: Browser, site: Site) -> None:
    with opened(chromium, site, signed_in=False) as page:
        for name, path in site.pages.items():
            assert "/login?next=" in page.request.get(path).url, name
        part = page.request.get("/nodes?part=nodes", max_redirects=0)
        assert (part.status, part.headers.get("hx-redirect")) == (401, "/login")


def test_socket_without_a_session_is_closed_with_4401(chromium: Browser, site: Site) -> None:
    with opened(chromium, site, signed_in=False) as page:
        page.goto("/login")
        code = page.evaluate(
            """() => new Promise(done => {
                const socket = new WebSocket(`ws://${location.host}/ws/live?topics=fleet`);
                socket.addEventListener("close", event => done(event.code));
            })"""
        )
    assert code == 4401


def test_wrong_password_is_told_on_the_page(chromium: Browser, site: Site) -> None:
    with opened(chromium, site, signed_in=False) as page:
        page.goto("/login")
        page.fill("#id_username", USER)
        page.fill("#id_password", PASSWORD + "!")
        page.click("button[type=submit]")
        expect(page.get_by_role("alert")).to_contain_text("correct username and password")


def test_logging_out_ends_the_session(chromium: Browser, site: Site) -> None:
    with opened(chromium, site, signed_in=False) as page:
        log_in(page)
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login")
        page.goto("/jobs")
        assert "/login?next=" in page.url


@pytest.mark.parametrize("dark", [False, True])
def test_table_that_is_cut_shows_at_which_side_there_is_more(chromium: Browser, site: Site, dark: bool) -> None:
    with opened(chromium, site, dark=dark, width=390) as page:
        visit(page, "/nodes")
        page.click('[data-switch="live"]')
        # Only the ground is looked at, not what the table happens to show there, nor what a last fetch puts there.
        restyle(page, "#nodes-table table { visibility: hidden; }")
        table = page.locator("#nodes-table")
        box = table.bounding_box()
        assert box is not None

        def strip(x: float) -> bytes:
            return page.screenshot(clip={"x": x, "y": box["y"] + 60, "width": 8, "height": 8})

        def shadows_at(share: float) -> tuple[bool, bool]:
            """(at the left, at the right), with the table scrolled that far."""
            table.evaluate("(it, share) => it.scrollTo((it.scrollWidth - it.clientWidth) * share, 0)", share)
            plain = strip(box["x"] + box["width"] / 2)
            return strip(box["x"] + 1) != plain, strip(box["x"] + box["width"] - 9) != plain

        for share, expected in [(0, (False, True)), (0.5, (True, True)), (1, (True, False))]:
            until = time.monotonic() + 10
            while (found := shadows_at(share)) != expected and time.monotonic() < until:
                page.wait_for_timeout(100)  # a picture may be of before the scroll
            assert found == expected, share


def test_names_of_nodes_are_never_broken(chromium: Browser, site: Site) -> None:
    broken_names = """() => {
        const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
        const found = [];
        while (walker.nextNode()) {
            for (const name of walker.currentNode.data.matchAll(/gpu-[0-9]+/g)) {
                const range = document.createRange();
                range.setStart(walker.currentNode, name.index);
                range.setEnd(walker.currentNode, name.index + name[0].length);
                if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1)
                    found.push(walker.currentNode.data);
            }
        }
        return found;
    }"""
    names = ("overview", "nodes", "jobs", "job", "job that waits for a fence", "incident", "drills")
    with opened(chromium, site) as page:
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            for name in names:
                page.goto(site.pages[name])
                assert page.evaluate(broken_names) == [], (name, width)


def test_job_that_needs_a_human_says_so_and_leads_to_its_incident(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        page.goto(site.pages["jobs"])
        for job, tags in (("escalated", 1), ("waiting", 1), ("recovering", 0)):
            row = page.locator("#jobs-table tr", has=page.locator(f'a[href="/jobs/{site.ids[job]}"]'))
            expect(row.get_by_role("link", name="Needs a human")).to_have_count(tags)
        page.goto(f"/jobs/{site.ids['escalated']}")
        page.locator(".title").get_by_role("link", name="Needs a human").click()
        page.wait_for_url(f"**/incidents/{site.ids['escalated_incident']}")


def test_drill_whose_job_was_stopped_is_shown_as_cancelled(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        page.goto("/drills")
        row = page.locator("#drills-table tr", has_text="Its incident was cancelled before it had recovered.")
        expect(row.locator(".badge")).to_have_text("Cancelled")
        expect(row.locator(".badge.tone-bad")).to_have_count(0)


def test_job_that_has_ended_promises_nothing_any_more(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        page.goto("/jobs/job_4k8m2n6p9qrs")
        expect(page.locator(".title")).to_contain_text("Succeeded")
        expect(page.locator("#content")).not_to_contain_text(re.compile(r"\byet\b|would be|next launch|is expected"))


def test_page_that_is_being_left_is_not_held_back_by_the_end_of_its_session(chromium: Browser, site: Site) -> None:
    """A log-out ends the session before its answer is there: the socket's end must not call the page back."""

    def answer_late(route: Route) -> None:
        time.sleep(2)
        route.continue_()

    with opened(chromium, site, signed_in=False) as page:
        page.add_init_script(
            """window.WebSocket = class extends WebSocket {
                constructor(...words) {
                    super(...words);
                    addEventListener("beforeunload", () =>
                        setTimeout(() => this.dispatchEvent(new CloseEvent("close", { code: 4401 })), 500));
                }
            };"""
        )
        log_in(page)
        wait_until_live(page)
        page.route("**/logout", answer_late)
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url(re.compile("/login"))
        assert page.url == f"{site.url}/login"


def test_dark_switch_changes_the_colours_and_is_kept(chromium: Browser, site: Site) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(chromium, site) as page:
        visit(page, "/jobs")
        light = page.evaluate(background)
        switch = page.locator('[data-switch="theme"]')
        while switch.inner_text().strip() != "Dark":
            switch.click()
        dark = page.evaluate(background)
        assert dark != light
        page.reload()
        assert page.evaluate(background) == dark
        expect(switch).to_have_text("Dark")


def test_times_are_in_utc_until_local_time_is_chosen(chromium: Browser, site: Site) -> None:
    with opened(chromium, site, zone="Asia/Tokyo") as page:
        visit(page, site.pages["incident"])
        shown = page.locator("#timeline time").first
        at = float(shown.get_attribute("data-at") or 0)
        assert shown.inner_text().startswith(time.strftime("%H:%M:%S", time.gmtime(at)))
        page.click('[data-switch="zone"]')
        assert shown.inner_text().startswith(time.strftime("%H:%M:%S", time.gmtime(at + 9 * 3600)))


def test_burst_of_entries_is_shown_whole_and_in_order_without_reload(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident that needs a human"])
        wait_until_live(page, "live")
        before = len(shown_seqs(page))
        page.evaluate("window.sameDocument = true")
        site.fleet("tell", site.ids["escalated_incident"], "250")
        expect(page.locator(TIMELINE_ROWS)).to_have_count(before + 250)
        assert shown_seqs(page) == list(range(1, before + 251))
        assert page.evaluate("window.sameDocument")


def test_pages_opened_during_a_burst_miss_no_entry(chromium: Browser, site: Site) -> None:
    path = site.pages["incident that needs a human"]
    with opened(chromium, site) as page:
        visit(page, path)
        before = len(shown_seqs(page))
        for round_number in range(1, 6):
            page.goto(path, wait_until="commit")
            site.fleet("tell", site.ids["escalated_incident"], "7")
            expect(page.locator(TIMELINE_ROWS)).to_have_count(before + 7 * round_number)
        assert shown_seqs(page) == list(range(1, before + 36))


def test_paused_page_stands_still_and_then_catches_up(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident that needs a human"])
        before = len(shown_seqs(page))
        pause = page.locator('[data-switch="live"]')
        pause.click()
        site.fleet("tell", site.ids["escalated_incident"], "3")
        expect(pause).to_contain_text("new")
        assert len(shown_seqs(page)) == before
        pause.click()
        expect(page.locator(TIMELINE_ROWS)).to_have_count(before + 3)


def test_receipt_and_end_appear_without_reload(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident under way"])
        expect(page.locator("#receipt")).to_contain_text("The receipt comes when")
        page.evaluate("window.sameDocument = true")
        site.fleet("recover", site.ids["open_incident"])
        expect(page.locator("#receipt")).to_contain_text("Continuity is proven.")
        expect(page.locator("#incident-head .page-head")).to_contain_text("Recovered")
        expect(page.locator("#announcer")).to_contain_text(re.compile("receipt|Recovered"))
        assert page.evaluate("window.sameDocument")


def test_without_redis_the_page_follows_by_polling_and_says_so(chromium: Browser, site_without_redis: Site) -> None:
    site = site_without_redis
    with opened(chromium, site) as page:
        visit(page, site.pages["incident that needs a human"])
        wait_until_live(page, "polling")
        before = len(shown_seqs(page))
        page.evaluate("window.sameDocument = true")
        site.fleet("tell", site.ids["escalated_incident"], "250")
        expect(page.locator(TIMELINE_ROWS)).to_have_count(before + 250)
        assert shown_seqs(page) == list(range(1, before + 251))
        assert page.evaluate("window.sameDocument")


def test_chart_shows_both_generations_with_the_replay_shaded(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["job"])
        chart = page.locator("#loss-chart")
        expect(chart).to_have_attribute("data-replays", "120-137")
        expect(chart).to_have_attribute("data-generations", "1 2")
        expect(chart.locator("canvas")).to_be_visible()
        # Pixels of one row near the top, where no curve runs: inside and outside of the replayed steps.
        inside, outside = page.evaluate(
            """() => {
                const canvas = document.querySelector("#loss-chart canvas");
                const over = document.querySelector("#loss-chart .u-over").getBoundingClientRect();
                const box = canvas.getBoundingClientRect();
                const scale = canvas.width / box.width;
                const last = Number(document.querySelector("#marks").dataset.marks.match(/reached_step":(\\d+)}]/)[1]);
                const pixel = step => {
                    const x = (over.left - box.left + (step - 1) / (last - 1) * over.width) * scale;
                    const y = (over.top - box.top + 30) * scale;
                    return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data];
                };
                return [pixel(128), pixel(250)];
            }"""
        )
        assert inside[3] > 0
        assert inside != outside


def test_curve_keeps_repeated_steps_and_the_canonical_one_has_each_once(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["job"])
        every, canonical, gap = page.evaluate(
            """async url => {
                const { Curves, aligned } = await import("/static/dashboard/js/curves.js");
                const curves = new Curves(url);
                await curves.update(2);
                const steps = only => curves.curves(only).flatMap(({ points }) => points.map(({ step }) => step));
                const [axis, first] = aligned(curves.curves(false), point => point.loss);
                return [steps(false), steps(true), axis.filter((_, index) => first[index] === null)];
            }""",
            f"/api/v1/jobs/{site.ids['steady']}/metrics",
        )
    repeated = {step for step in every if every.count(step) == 2}
    assert repeated == set(range(121, 138))
    assert len(canonical) == len(set(canonical))
    assert set(canonical) == set(every)
    assert gap == [62], "steps 62 to 70 were never reported: the line is broken there, not drawn through"


def test_chart_and_table_follow_new_steps(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["job"])
        chart = page.locator("#loss-chart")
        expect(chart).to_have_attribute("aria-label", re.compile("steps 121 to 312"))
        site.fleet("step", site.ids["steady"], "8")
        expect(chart).to_have_attribute("aria-label", re.compile("steps 121 to 320"))
        page.click("#chart-data summary")
        rows = page.locator("#steps-table tbody tr")
        expect(rows.first).to_contain_text("320")
        expect(page.locator("#steps-table")).to_contain_text("Replaced")


def test_drill_is_confirmed_by_a_dialog_that_names_node_and_job(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, f"/drills?job={site.ids['steady']}&rank=1")
        drills = page.locator("#drills-table tbody tr")
        before = drills.count()
        trigger = page.get_by_role("button", name="Trigger drill")
        trigger.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("gpu-02 sends SIGKILL to rank 1 of tiny-gpt")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert drills.count() == before
        trigger.click()
        dialog.get_by_role("button", name="Kill this rank").click()
        expect(page.get_by_role("status").first).to_contain_text("is on its way")
        expect(drills).to_have_count(before + 1)
        expect(drills.first).to_contain_text("Requested")


def test_refused_drill_says_which_guard_refused(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/drills")
        token = page.locator('#drill-form [name="csrfmiddlewaretoken"]').get_attribute("value") or ""
        form = {"csrfmiddlewaretoken": token, "kind": "kill-rank", "job": site.ids["escalated"], "rank": "1"}
        answer = page.request.post("/drills", form=form, headers={"Referer": f"{site.url}/drills"})
        assert "Refused by the guard" in answer.text()
        assert "steady_state" in answer.text()


def test_stop_is_asked_for_and_told(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["job in recovery"])
        page.get_by_role("button", name="Stop job").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("llm-7b-pretrain")
        dialog.get_by_role("button", name="Keep it running").click()
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Stop job").click()
        dialog.get_by_role("button", name="Stop the job").click()
        expect(page.get_by_role("status").first).to_contain_text("Stopping")


def test_escalated_incident_says_first_what_a_human_can_do(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, site.pages["incident that needs a human"])
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("This needs a human.")
        expect(alert).to_contain_text("Try again")
        page.get_by_role("button", name="Try again").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("relaunches from the newest trusted checkpoint")
        dialog.get_by_role("button", name="Try again").click()
        expect(page.locator("#timeline")).to_contain_text("operator asked to retry this incident.")


def test_node_out_of_contact_is_never_green(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        visit(page, "/nodes/gpu-05")
        expect(page.locator(".page-head")).to_contain_text("Unknown")
        expect(page.locator("#gpu-table")).to_contain_text("Stale")
        assert page.locator(".tone-good:visible").count() == 0


def test_errors_are_pages_of_the_same_look(chromium: Browser, site: Site) -> None:
    with opened(chromium, site) as page:
        missing = page.goto("/incidents/inc_none")
        assert missing is not None
        assert missing.status == 404
        expect(page.locator("main")).to_contain_text("There is no incident inc_none.")
        forged = page.request.post("/drills", form={"kind": "kill-rank"})
        assert forged.status == 403
        assert "This form was not accepted" in forged.text()
        assert missing.headers["content-security-policy"].startswith("default-src 'self'; script-src 'self'")


def test_lost_server_is_told_and_nothing_stays_green(chromium: Browser, site_without_redis: Site) -> None:
    """Stops the server without Redis: it must be the last test that uses it."""
    with opened(chromium, site_without_redis) as page:
        visit(page, "/nodes")
        as_of = page.locator(".live-as-of")
        expect(as_of).to_contain_text("showing data of")
        site_without_redis.stop()
        wait_until_live(page, "offline")
        colours = page.eval_on_selector_all(
            ".content .badge", "badges => [...new Set(badges.map(badge => getComputedStyle(badge).color))]"
        )
        assert len(colours) == 1
