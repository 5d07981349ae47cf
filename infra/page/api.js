// Service client: talks to the service with the token in a header (never a cookie), and one stream of updates.

/** Path of the dashboard: a service may be below a prefix. */
export const ROOT = new URL("..", import.meta.url).pathname.replace(/\/$/, "");
const KEY = `paceline-token ${ROOT}`;
export const token = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export const headers = (more = {}) => (token.get() ? { ...more, authorization: `Bearer ${token.get()}` } : more);

/** GET JSON; throws an Error with `status` and the service's own message. */
export async function getJson(path) {
  return checked(await fetch(`${ROOT}/api/${path}`, { headers: headers(), cache: "no-store" }));
}

/** POST a command; throws as getJson does. */
export async function command(name, body = {}) {
  const sent = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body) };
  return checked(await fetch(`${ROOT}/api/commands/${name}`, sent));
}

async function checked(response) {
  if (response.ok) return response.json();
  const text = await response.text();
  let message = text.slice(0, 300);
  try { message = JSON.parse(text).error.message; } catch { /* not the service's own error: shown as it is */ }
  throw Object.assign(new Error(message || `the service answered ${response.status}`), { status: response.status });
}

/** Save an export; fetched with the token, so that it needs no open address. */
export async function download(name) {
  const response = await fetch(`${ROOT}/api/export/${name}`, { headers: headers() });
  if (!response.ok) await checked(response);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = `paceline-${name}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Follow the stream for ever: update(data) for each event, status("live" | "lost" | "closed", message). Sleeps while the page is hidden. */
export class Feed {
  constructor(update, status) {
    Object.assign(this, { update, status, digests: {}, since: 0, abort: null, wake: null, wait: 1000 });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.abort?.abort() : this.poke()));
  }
  /** Try again now: a token was entered, or the page is looked at again. */
  poke() { this.wait = 1000; this.wake?.(); }
  restart() { this.digests = {}; this.abort?.abort(); this.poke(); }
  async run() {
    for (;;) {
      if (document.hidden) { await new Promise((r) => (this.wake = r)); continue; }
      try {
        if (await this.once()) continue;
      } catch (e) {
        if (e.name === "AbortError") continue;
        this.status(e.status === 401 || e.status === 403 ? "closed" : "lost", e.status ? e.message : "connection lost");
      }
      await new Promise((r) => { this.wake = r; setTimeout(r, this.wait); });
      this.wait = Math.min(this.wait * 2, 10000);
    }
  }
  /** One stream; whether it ended with `renew`. Any other end (the replica stops) is followed by a wait. */
  async once() {
    this.abort = new AbortController();
    const have = Object.entries(this.digests).map(([k, v]) => `${k}:${v}`).join(",");
    const response = await fetch(`${ROOT}/api/events?have=${have}&since=${this.since}`, { headers: headers(), signal: this.abort.signal, cache: "no-store" });
    if (!response.ok) await checked(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let isRenewed = false;
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return isRenewed;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        isRenewed ||= event.startsWith("event: renew\n");
        this.take(event);
      }
    }
  }
  take(event) {
    if (!event.startsWith("event: update\n")) return;
    const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));
    Object.assign(this.digests, data.digests);
    for (const bin of data.bins) this.since = Math.max(this.since, bin.ts);
    this.wait = 1000;
    this.status("live", "");
    this.update(data);
  }
}
