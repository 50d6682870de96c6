// The server's time in the browser, and how times are written. Ages are counted on the server's clock: a browser whose
// own clock is wrong must not make fresh data look old.

let offset_s = 0;

/** Learn the server's clock from a moment (Unix seconds) that it has just told. */
export function learnServerTime(now_s) {
  if (now_s > 0) {
    offset_s = now_s - Date.now() / 1000;
  }
}

export function serverNow() {
  return Date.now() / 1000 + offset_s;
}

/** Remember a choice of the user; without storage it holds for this page only. */
export function remember(name, value) {
  try {
    localStorage.setItem(`everstep.${name}`, value);
  } catch {
    // Storage is forbidden.
  }
}

export function recall(name) {
  try {
    return localStorage.getItem(`everstep.${name}`);
  } catch {
    return null;
  }
}

export function inLocalTime() {
  return document.documentElement.dataset.zone === "local";
}

const two = (value) => String(value).padStart(2, "0");

/** Date and time of Unix seconds in the chosen zone: `2031-05-04 03:02:01`, and its zone. */
export function written(at_s, { date = true, milliseconds = false } = {}) {
  const at = new Date(at_s * 1000);
  const local = inLocalTime();
  const [year, month, day, hour, minute, second] = local
    ? [at.getFullYear(), at.getMonth(), at.getDate(), at.getHours(), at.getMinutes(), at.getSeconds()]
    : [at.getUTCFullYear(), at.getUTCMonth(), at.getUTCDate(), at.getUTCHours(), at.getUTCMinutes(), at.getUTCSeconds()];
  const time = `${two(hour)}:${two(minute)}:${two(second)}`;
  const exact = milliseconds ? `${time}.${String(at.getUTCMilliseconds()).padStart(3, "0")}` : time;
  return date ? `${year}-${two(month + 1)}-${two(day)} ${exact}` : exact;
}

/** A rough duration, as the server's `span` filter writes it. */
export function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole < 600 ? ` ${two(whole % 60)} s` : ""}`;
  if (whole < 172_800) {
    return `${Math.floor(whole / 3600)} h${whole < 36_000 ? ` ${two(Math.floor((whole % 3600) / 60))} min` : ""}`;
  }
  return `${Math.floor(whole / 86_400)} d`;
}

/** A measured duration, as the server's `seconds` filter writes it. */
export function measured(seconds) {
  if (seconds < 9.995) return `${Math.max(0, seconds).toFixed(2)} s`;
  return seconds < 99.95 ? `${seconds.toFixed(1)} s` : span(seconds);
}
