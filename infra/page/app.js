// Dashboard: takes updates, keeps the parts, redraws what changed.

import { Feed, ROOT, download, token } from "./api.js";
import { Controls } from "./controls.js";
import { drawDecisions, drawLedger, drawPosterior, showNotes } from "./decisions.js";
import { ago, byId, clock, el, facts, number, show, themeSwitch, whole } from "./dom.js";
import { Traffic } from "./traffic.js";
import { drawSwaps, drawVersions, shareBar, showJobs, showReplicas, showRollout } from "./versions.js";

const parts = {};
let now = Date.now() / 1000;
const traffic = new Traffic(() => draw(["traffic"]));
const controls = new Controls(() => feed.restart());

const DRAW = {
  head: () => { byId("model").textContent = `${parts.head.model ?? ""} · policy ${parts.head.policy ?? "none"}`; controls.show(parts); },
  answers: () => showAnswers(),
  latency: () => showLatency(parts.latency),
  traffic: () => traffic.draw(parts, now),
  decisions: () => { showNotes(parts.decisions.notes); return drawDecisions(parts.decisions, parts.regimes); },
  ledger: () => drawLedger(parts.ledger),
  posterior: () => drawPosterior(parts.posterior),
  versions: () => { controls.show(parts); return drawVersions(parts.versions); },
  rollout: () => showRollout(parts.rollout),
  swaps: () => drawSwaps(parts.swaps),
  replicas: () => showReplicas(parts.replicas, parts.head.gen),
  jobs: () => showJobs(parts.jobs, now),
  health: () => showHealth(parts.health),
};
const NEEDS_TRAFFIC = ["buckets", "regimes", "swaps", "decisions", "rollout"];

const CHARTS = new Set(["traffic", "decisions", "ledger", "posterior", "versions", "swaps"]);
const waiting = new Set();
let isDrawing = false;

/** Redraw parts: words at once, charts one after the other; a slow machine skips frames instead of piling them up. */
async function draw(names) {
  for (const name of names) if (CHARTS.has(name)) waiting.add(name); else await one(name);
  if (isDrawing) return;
  isDrawing = true;
  while (waiting.size) {
    const [name] = waiting;
    waiting.delete(name);
    await one(name);
  }
  isDrawing = false;
}

async function one(name) {
  if (name !== "traffic" && !parts[name]) return;
  try { await DRAW[name](); } catch (e) { console.error(`part ${name} could not be drawn`, e); }
}

function showAnswers() {
  show(byId("answers"), ...parts.answers.map((a) => el("article", { class: "panel answer", "data-tone": a.tone, id: `answer-${a.id}` },
    el("h2", {}, a.question), el("p", { class: "verdict" }, a.verdict), el("p", {}, a.text, a.ts ? ` (${ago(a.ts, now)}) ` : "", a.decision_id ? el("a", { href: `${ROOT}/decisions/${a.decision_id}`, "data-key": "last" }, "Details") : null),
    a.before ? el("p", {}, `${a.before.text} `, el("a", { href: `${ROOT}/decisions/${a.before.decision_id}`, "data-key": "before" }, "Details")) : null,
    a.trial ? el("p", {}, `${a.trial.text} (${ago(a.trial.ts, now)})`) : null,
    a.job ? el("p", { class: "busy" }, `${a.job.text}, for ${ago(a.job.since, now).replace(" ago", "")}.`) : null,
    a.note ? el("p", { class: "busy" }, a.note) : null,
    a.shares?.length ? shareBar(a.shares) : null,
    a.shares?.length ? el("p", { class: "hint" }, a.shares.map((s) => `${s.label} ${s.percent.toFixed(0)}%`).join(" · ")) : null)));
}

function showLatency(t) {
  const time = (s) => (s === null ? "-" : s < 1 ? `${number(s * 1e3, s < 0.01 ? 2 : 0)} ms` : `${number(s)} s`);
  const part = (name, q) => `${name} ${time(q.p50_s)} (p99 ${time(q.p99_s)})`;
  show(byId("latency"), `Past minute, half of the clients waited at most: ${part("first token", t.first_token)} · ${part("between tokens", t.per_token)} · ${part("whole answer", t.whole)} · ${whole(t.num_answers)} answers, `,
    t.num_failed ? el("span", { class: "bad" }, `${whole(t.num_failed)} failed`) : "none failed");
}

function showHealth(h) {
  const f = h.feedback ?? {};
  const lost = (f.dropped ?? 0) + (f.lost_entries ?? 0) + (f.missing_batches ?? 0);
  facts(byId("health"), [
    ["Redis", !h.is_adaptive ? null : h.redis_up && !h.is_redis_full ? "reachable" : h.redis_up ? el("span", { class: "bad" }, "out of memory or disk: serving goes on, nothing is stored") : el("span", { class: "bad" }, "away: serving goes on, nothing is decided")], ["controller", !h.is_adaptive ? "none: nothing adapts" : h.has_controller ? `start ${h.epoch ?? "-"}, snapshot ${ago(h.ts, now)}` : el("span", { class: "bad" }, "away")],
    ["stored state", h.read_only ? el("span", { class: "bad" }, h.read_only) : null], ["data folder", h.folder_error ? el("span", { class: "bad" }, h.folder_error) : null],
    ["errors of the controller", h.errors.count ? el("span", { class: "bad" }, `${h.errors.count}: ${h.errors.last}`) : "none"], ["feedback not read yet (lag)", f.lag === null || f.lag === undefined ? "-" : `${whole(f.lag)} batches`],
    ["feedback rows folded", whole(f.delivered)], ["lost on the way", lost ? el("span", { class: "bad" }, `${whole(f.dropped)} rows dropped, ${whole(f.missing_batches)} batches missing, ${whole(f.lost_entries)} entries trimmed`) : "nothing"], ["delivered twice, counted once", whole(f.duplicates)],
    ["this replica", (h.replica_id ?? "-").slice(0, 12)], ["requests running / waiting", `${whole(h.engine.num_running)} / ${whole(h.engine.num_waiting)}`], ["KV pages free", `${whole(h.engine.num_free_pages)} of ${whole(h.engine.num_pages)}`],
    ["tokens sent by it", whole(h.engine.num_tokens)], ["requests finished / ended early", `${whole(h.engine.num_finished)} / ${whole(h.engine.num_aborted)}`], ["traces written / dropped", h.traces ? `${whole(h.traces.traces_written)} / ${whole(h.traces.traces_dropped)}` : null],
    ["regime expected to last", parts.regimes?.horizon_s ? `${number(parts.regimes.horizon_s, 0)} s more` : null],
  ]);
}

function update(data) {
  now = data.ts;
  Object.assign(parts, data.parts);
  const changed = new Set(Object.keys(data.parts));
  if (changed.has("head") || !parts.head) changed.add("replicas");
  if (traffic.take(data.bins) || NEEDS_TRAFFIC.some((n) => changed.has(n))) changed.add("traffic");
  changed.add("answers").add("jobs").add("health"); // they hold ages
  status();
  draw(Object.keys(DRAW).filter((n) => changed.has(n) && (n === "traffic" || parts[n])));
}

function status(text = null, tone = "bad") {
  const h = parts.head, state = parts.health;
  if (!text && h) [text, tone] = !h.is_adaptive ? ["live, nothing adapts", "good"] : !h.has_controller ? ["controller away: showing the latest known", "bad"] : !state.redis_up ? ["Redis away: nothing is decided", "bad"] : state.read_only ? ["stored state refused: nothing is decided", "bad"] : h.is_paused ? ["paused", "busy"] : parts.jobs?.running ? ["live, training", "busy"] : ["live", "good"];
  const node = byId("status");
  if (text && node.textContent !== text) node.textContent = text;
  node.dataset.tone = tone;
}

let isLost = false;

function connection(kind, message) {
  if (kind === "live" && isLost) controls.check(); // it may have been started again, with other tokens
  isLost = kind !== "live";
  byId("login").hidden = kind !== "closed";
  if (kind === "closed") byId("login-text").textContent = message;
  if (kind !== "live") status(kind === "closed" ? "closed" : `${message}, trying again (since ${clock(now)})`, "bad");
}

const feed = new Feed(update, connection);
themeSwitch(byId("theme"), () => draw(Object.keys(DRAW).filter((n) => n === "traffic" ? parts.buckets : parts[n])));
byId("show-holds").addEventListener("change", () => draw(["decisions"]));
byId("split").addEventListener("change", () => draw(["ledger"]));
byId("posterior-bucket").addEventListener("change", () => draw(["posterior"]));
byId("export").addEventListener("change", async (e) => { const name = e.target.value; e.target.value = ""; if (name) try { await download(name); } catch (x) { status(x.message); } });
byId("login-form").addEventListener("submit", (e) => { e.preventDefault(); token.set(byId("login-token").value.trim()); byId("login-token").value = ""; feed.restart(); controls.check(); });
controls.check();
feed.run();
