// Keeps the page current. A socket says which topics have news; the parts of the page that show them are fetched anew,
// each not more often than it says. Without a socket the parts are fetched every few seconds.
//
// A part is an element with data-live-part and
//   data-topics  what it shows, separated by spaces
//   data-gap     milliseconds between two fetches
//   data-every   seconds after which it is fetched without being told (optional)
//   data-live-grow  its entries are numbered by data-seq, and only those after the last one are fetched

import { learnServerTime, serverNow, written } from "./clock.js";

const POLL_MS = 3000;
const SILENCE_MS = 15_000; // The server says something every 5 s.
const SLOW_MS = 1500; // A fetch under way for longer shows as "catching up".
const LOST_MS = 20_000; // A fetch without an end; htmx's own limit is 15 s.
const LEAVING_MS = 5000; // A navigation may take so long before it counts as given up.

const bar = document.querySelector(".live-bar");
const word = bar.querySelector("[data-live-word]");
const asOf = bar.querySelector("time");
const pauseButton = bar.querySelector('[data-switch="live"]');
const announcer = document.getElementById("announcer");

const parts = new Map();
for (const element of document.querySelectorAll("[data-live-part]")) {
  parts.set(element, {
    topics: element.dataset.topics.split(" "),
    gap_ms: Number(element.dataset.gap ?? 500),
    every_ms: Number(element.dataset.every ?? 0) * 1000,
    grows: "liveGrow" in element.dataset,
    fetchedAt: performance.now(),
    startedAt: null, // of the fetch under way
    wantedSince: null, // news that are not on the page yet
    timer: null,
    announced: element.querySelector("[data-announce]")?.dataset.announce,
    kept: null,
  });
}

let socket = null;
let socketMode = null; // What the server says of its feed; null without a socket.
let heardAt = 0;
let failures = 0;
let httpFailed = false;
let paused = false;
let waiting = 0;
let shownAsOf = serverNow();
let isLeaving = false;

// Fetching

function want(element, part) {
  part.wantedSince ??= performance.now();
  if (paused || part.timer !== null || isBusy(part)) return;
  const wait = Math.max(0, part.fetchedAt + part.gap_ms - performance.now());
  part.timer = setTimeout(() => fetchPart(element, part), wait);
}

function isBusy(part) {
  return part.startedAt !== null && performance.now() - part.startedAt < LOST_MS;
}

function fetchPart(element, part) {
  part.timer = null;
  if (paused) return;
  if (isInUse(element)) {
    // Replacing a field under the user's hands would lose what is being chosen.
    part.timer = setTimeout(() => fetchPart(element, part), 1000);
    return;
  }
  part.startedAt = part.fetchedAt = performance.now();
  part.wantedSince = null;
  part.requestedAt = serverNow();
  htmx.trigger(element, "live");
}

function isInUse(element) {
  const active = document.activeElement;
  if (element.contains(active) && active.matches("input, select, textarea")) return true;
  const selection = getSelection();
  return !selection.isCollapsed && element.contains(selection.anchorNode);
}

function lastSeq(element) {
  const entries = element.querySelectorAll("[data-seq]");
  return entries.length ? Number(entries[entries.length - 1].dataset.seq) : 0;
}

function knownSeq(element) {
  return Number(element.querySelector("[data-last-seq]")?.dataset.lastSeq ?? 0);
}

document.addEventListener("htmx:configRequest", (event) => {
  if (parts.get(event.target)?.grows) {
    event.detail.parameters.after_seq = lastSeq(event.target);
  }
});

document.addEventListener("htmx:beforeSwap", (event) => {
  const part = parts.get(event.target);
  if (!part || part.grows) return;
  part.kept = {
    focus: event.target.contains(document.activeElement) ? document.activeElement.id : "",
    scrolls: [...event.target.querySelectorAll(".table-scroll[id]")].map((e) => [e.id, e.scrollLeft, e.scrollTop]),
    open: [...event.target.querySelectorAll("details[id][open]")].map((e) => e.id),
  };
});

document.addEventListener("htmx:afterSwap", (event) => {
  const part = parts.get(event.target);
  if (!part) return;
  if (part.grows) {
    // Each answer ends with a marker that says how far the story goes; only the newest counts.
    const markers = event.target.querySelectorAll("[data-last-seq]");
    [...markers].slice(0, -1).forEach((marker) => marker.remove());
  }
  for (const [id, left, top] of part.kept?.scrolls ?? []) {
    document.getElementById(id)?.scrollTo(left, top);
  }
  for (const id of part.kept?.open ?? []) {
    document.getElementById(id)?.setAttribute("open", "");
  }
  if (part.kept?.focus) {
    document.getElementById(part.kept.focus)?.focus({ preventScroll: true });
  }
  part.kept = null;
  const says = event.target.querySelector("[data-announce]")?.dataset.announce;
  if (says && says !== part.announced) {
    part.announced = says;
    announcer.textContent = says;
  }
});

document.addEventListener("htmx:afterRequest", (event) => {
  const part = parts.get(event.target);
  if (!part) return;
  part.startedAt = null;
  httpFailed = !event.detail.successful;
  if (httpFailed) {
    part.wantedSince ??= performance.now();
  } else if (part.grows && lastSeq(event.target) < knownSeq(event.target)) {
    want(event.target, part);
  }
  if (part.wantedSince !== null && !httpFailed) {
    want(event.target, part);
  }
  if (!httpFailed && !isBehind()) {
    shownAsOf = Math.max(shownAsOf, part.requestedAt);
  }
  show();
});

function isBehind(longerThan_ms = 0) {
  const limit = performance.now() - longerThan_ms;
  return [...parts.values()].some(
    (part) => (part.wantedSince !== null && part.wantedSince <= limit) || (part.startedAt !== null && part.startedAt <= limit),
  );
}

// The socket

window.addEventListener("beforeunload", () => (isLeaving = true));

function connect() {
  const topics = new Set([...parts.values()].flatMap((part) => part.topics));
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const query = [...topics].map(encodeURIComponent).join(",");
  socket = new WebSocket(`${scheme}://${location.host}/ws/live?topics=${query}`);
  socket.addEventListener("message", (event) => hear(JSON.parse(event.data)));
  socket.addEventListener("close", (event) => {
    if (event.code === 4401) {
      // Logged out: the server answers with the log-in page. A page that goes elsewhere already is let go.
      setTimeout(() => location.reload(), isLeaving ? LEAVING_MS : 0);
      return;
    }
    socketMode = null;
    show();
    failures += 1;
    const most_ms = Math.min(10_000, 500 * 2 ** failures);
    setTimeout(connect, most_ms * (0.5 + Math.random() / 2));
  });
}

function hear(frame) {
  heardAt = performance.now();
  failures = 0;
  socketMode = frame.mode;
  learnServerTime(frame.now);
  for (const notice of frame.notices) {
    for (const [element, part] of parts) {
      if (!part.topics.includes(notice.topic)) continue;
      if (part.grows && notice.seq <= lastSeq(element)) continue;
      if (paused) waiting += 1;
      want(element, part);
    }
  }
  if (!paused && !isBehind()) {
    shownAsOf = Math.max(shownAsOf, frame.as_of);
  }
  show();
}

// What the bar says

function status() {
  if (paused) return "paused";
  if (socketMode === null) {
    if (httpFailed) return "offline";
    return failures === 0 ? "catching up" : "polling";
  }
  if (socketMode === "offline" || httpFailed) return "offline";
  if (isBehind(SLOW_MS)) return "catching up";
  return socketMode;
}

function show() {
  const now = status();
  if (bar.dataset.live !== now) {
    bar.dataset.live = now;
    word.textContent = now[0].toUpperCase() + now.slice(1);
  }
  asOf.dataset.at = shownAsOf.toFixed(3);
  asOf.textContent = written(shownAsOf, { date: false });
  document.documentElement.classList.toggle("is-offline", now === "offline");
  pauseButton.querySelector("[data-word]").textContent = paused
    ? waiting > 0
      ? `Resume live (${waiting} new)`
      : "Resume live"
    : "Pause live";
}

function wantAll() {
  for (const [element, part] of parts) {
    want(element, part);
  }
}

pauseButton.addEventListener("click", () => {
  paused = !paused;
  waiting = 0;
  pauseButton.setAttribute("aria-pressed", String(paused));
  if (!paused) wantAll();
  show();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) wantAll();
});

setInterval(() => {
  if (socketMode !== null && performance.now() - heardAt > SILENCE_MS) {
    socket.close(4000, "silent");
  }
  if (!document.hidden) {
    for (const [element, part] of parts) {
      const every_ms = socketMode === null || httpFailed ? POLL_MS : part.every_ms;
      if (every_ms > 0 && performance.now() - part.fetchedAt > every_ms) want(element, part);
    }
  }
  show();
}, 1000);

if (parts.size > 0) {
  connect();
} else {
  bar.hidden = true;
}
