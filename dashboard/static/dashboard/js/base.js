// What every page does by itself: ages that count on, values that grow stale, switches, dialogs, copy buttons.

import { inLocalTime, learnServerTime, measured, recall, remember, serverNow, span, written } from "./clock.js";

learnServerTime(Number(document.querySelector('meta[name="server-now"]')?.content));

/** Write all times anew and grey what has grown stale. */
export function refreshTimes(root = document) {
  const now = serverNow();
  for (const time of root.querySelectorAll("time[data-at]")) {
    const at = Number(time.dataset.at);
    const text = {
      ago: () => `${span(now - at)} ago`,
      clock: () => written(at, { date: false, milliseconds: true }),
      second: () => written(at, { date: false }),
      moment: () => `${written(at)} ${inLocalTime() ? "local" : "UTC"}`,
    }[time.dataset.style]();
    if (time.textContent !== text) {
      time.textContent = text;
      time.title = `${written(at)} ${inLocalTime() ? "local time" : "UTC"}`;
    }
  }
  for (const element of root.querySelectorAll("[data-since]")) {
    const write = element.dataset.style === "span" ? span : measured;
    element.textContent = write(now - Number(element.dataset.since));
  }
  for (const element of root.querySelectorAll("[data-until]")) {
    const left = Number(element.dataset.until) - now;
    element.textContent = left > 0 ? `in ${span(left)}` : "any moment now";
  }
  for (const element of root.querySelectorAll("[data-stale-at]")) {
    if (now > Number(element.dataset.staleAt)) {
      element.classList.add("is-stale");
    }
  }
}

const THEMES = { system: "System", light: "Light", dark: "Dark" };

function showTheme(theme) {
  const button = document.querySelector('[data-switch="theme"]');
  button.querySelector("[data-word]").textContent = THEMES[theme];
  button.querySelector("use").setAttribute("href", theme === "dark" ? "#i-moon" : "#i-sun");
  button.setAttribute("aria-label", `Colours: ${THEMES[theme]}. Change`);
}

function chooseTheme(theme) {
  if (theme === "system") {
    delete document.documentElement.dataset.theme;
  } else {
    document.documentElement.dataset.theme = theme;
  }
  remember("theme", theme);
  showTheme(theme);
  document.dispatchEvent(new CustomEvent("everstep:colours"));
}

function chooseZone(zone) {
  document.documentElement.dataset.zone = zone;
  const button = document.querySelector('[data-switch="zone"]');
  button.querySelector("[data-word]").textContent = zone === "local" ? "Local" : "UTC";
  button.setAttribute("aria-label", `Times in ${zone === "local" ? "local time" : "UTC"}. Change`);
  refreshTimes();
}

const SWITCHES = {
  theme: () => {
    const order = Object.keys(THEMES);
    const present = document.documentElement.dataset.theme ?? "system";
    chooseTheme(order[(order.indexOf(present) + 1) % order.length]);
  },
  zone: () => {
    const zone = inLocalTime() ? "utc" : "local";
    remember("zone", zone);
    chooseZone(zone);
  },
};

document.addEventListener("click", async (event) => {
  const target = event.target.closest("button, [data-close]");
  if (!target) return;
  SWITCHES[target.dataset.switch]?.();
  if (target.dataset.dialog) {
    document.getElementById(target.dataset.dialog).showModal();
  }
  if ("close" in target.dataset) {
    target.closest("dialog").close();
  }
  if (target.dataset.copy) {
    await navigator.clipboard?.writeText(target.dataset.copy);
    document.getElementById("announcer").textContent = `Copied ${target.dataset.copy}`;
  }
});

// A second click on a button that is already sending must not send twice.
document.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (button && event.target.method === "post") {
    setTimeout(() => {
      button.disabled = true;
    });
  }
});

// A page that comes back from the browser's cache has its buttons as they were left.
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  document.dispatchEvent(new CustomEvent("everstep:colours"));
});

showTheme(document.documentElement.dataset.theme ?? "system");
chooseZone(recall("zone") === "local" ? "local" : "utc");
setInterval(() => {
  if (!document.hidden) refreshTimes();
}, 1000);
document.addEventListener("htmx:afterSwap", (event) => refreshTimes(event.target));
