// Versions: the family tree of drafter versions with their scores, shares of requests, swaps, replicas and training jobs.

import { ago, byId, clock, color, el, facts, number, short, show, table, whole } from "./dom.js";
import { link } from "./decisions.js";
import { TIME, date, draw, plain } from "./plot.js";

const best = (scores) => Object.entries(scores).sort((a, b) => b[1] - a[1]);
const tone = (v) => (v.roles.includes("live") ? "adaptive" : v.roles.includes("canary") ? "canary" : v.roles.includes("first") ? "static" : "plain");

/** Place nodes: x = generation, y = lane; children spread below their parent in order of creation. */
export function place(versions) {
  const known = new Map(versions.map((v) => [v.version, v]));
  const children = (v) => versions.filter((c) => c.parent === v.version && c !== v);
  const at = new Map();
  let lane = 0;
  const put = (v, depth) => {
    if (at.has(v.version)) return;
    at.set(v.version, { x: depth, y: lane });
    const own = children(v);
    own.forEach((c, i) => { if (i > 0) lane += 1; put(c, depth + 1); });
  };
  for (const root of versions.filter((v) => !known.has(v.parent))) { put(root, 0); lane += 1; }
  for (const v of versions) if (!at.has(v.version)) { put(v, 0); lane += 1; } // a damaged parent link must not hide a version
  return at;
}

export async function drawVersions(versions) {
  versionTable(versions);
  const at = place(versions), x = [], y = [];
  for (const v of versions) {
    const from = at.get(v.parent), to = at.get(v.version);
    if (from) { x.push(from.x, to.x, null); y.push(from.y, to.y, null); }
  }
  const hover = (v) => [`${plain(v.version)} ${v.roles.map((r) => plain(r)).join(", ")}`, `${plain(v.arm)} on ${plain(v.bucket ?? "-")}, ${whole(v.num_train_rows)} rows`, ...best(v.scores).map(([b, s]) => `${plain(b)}: ${number(s)} tokens/round`)].join("<br>");
  await draw(byId("lineage"), [
    { type: "scatter", mode: "lines", x, y, line: { color: color("muted"), width: 1.5 }, hoverinfo: "skip" },
    { type: "scatter", mode: "markers+text", x: versions.map((v) => at.get(v.version).x), y: versions.map((v) => at.get(v.version).y), text: versions.map((v) => plain(short(v.version).slice(0, 6) + (v.roles.length ? ` (${v.roles.join(", ")})` : ""))),
      textposition: "bottom center", hovertext: versions.map(hover), hovertemplate: "%{hovertext}<extra></extra>", marker: { size: 18, color: versions.map((v) => color(tone(v))), symbol: versions.map((v) => (v.roles.includes("live") ? "star" : "circle")) }, meta: { versions: versions.map((v) => v.version) } },
  ], { title: "Family tree (star: live; hover for scores)", xaxis: { visible: false, range: [-0.6, Math.max(1, ...[...at.values()].map((p) => p.x)) + 0.6] }, yaxis: { visible: false, range: [Math.max(1, ...[...at.values()].map((p) => p.y)) + 0.8, -0.6] } });
}

function versionTable(versions) {
  table(byId("version-table"), [
    { name: "version", value: (v) => short(v.version) }, { name: "role", value: (v) => el("span", {}, ...v.roles.map((r) => el("span", { class: "tag" }, r)), v.stage ? el("span", { class: "tag" }, v.stage) : "") },
    { name: "parent", value: (v) => short(v.parent) }, { name: "made by", value: (v) => (v.bucket ? `${v.arm} on ${v.bucket}` : v.arm) }, { name: "rows", number: true, value: (v) => whole(v.num_train_rows) },
    { name: "created", value: (v) => clock(v.created) }, { name: "acceptance length by bucket", wide: true, value: (v) => best(v.scores).slice(0, 6).map(([b, s]) => `${b} ${number(s)}`).join(", ") || "not served or scored yet" },
  ], versions.slice().reverse(), "The registry holds no version.");
}

export function shareBar(shares) {
  const bar = el("div", { class: "sharebar", role: "img", "aria-label": shares.map((s) => `${s.label} ${s.percent.toFixed(0)}%`).join(", ") });
  for (const s of shares) { const part = el("span", { class: `share-${s.role}` }); part.style.flexGrow = s.percent; bar.append(part); }
  return bar;
}

export function showRollout(part) {
  const r = part.rollout ?? {};
  show(byId("shares"), shareBar(part.shares), ...part.shares.map((s) => el("p", {}, `${s.percent.toFixed(0)}% ${s.label}: ${short(s.version)}`)), el("p", {}, part.text));
  const odds = (name) => (r.log_evidence ? `${number(Math.exp(r.log_evidence[name]), 1)} : 1 of ${number(Math.exp(r.thresholds[name]), 0)} : 1 needed` : null);
  facts(byId("rollout"), [
    ["evidence that it is slower", odds("slower")], ["evidence that it is fast enough", odds("fast_enough")], ["requests followed now", r.log_evidence ? whole(r.num_open) : null],
    ["errors, incumbent and canary", r.num_errors ? r.num_errors.join(" and ") : null], ["no training before", Object.entries(r.frozen_until ?? {}).map(([b, t]) => `${b}: ${clock(t)}`).join(", ")],
  ]);
}

export async function drawSwaps(part) {
  const n = Math.min(part.times.length, part.pause_ms.length);
  await draw(byId("swaps"), [{ type: "scatter", mode: "markers", x: part.times.slice(-n).map(date), y: part.pause_ms.slice(-n), marker: { color: color("good"), size: 9 }, hovertemplate: "%{y:.3f} ms<extra></extra>" }], {
    title: n ? "Milliseconds that the engine stood still" : "", annotations: n ? [] : [{ text: "no swap yet", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }], xaxis: { ...TIME, visible: n > 0 }, yaxis: { rangemode: "tozero", visible: n > 0, ticksuffix: " ms" },
  });
}

export function showReplicas(rows, gen) {
  table(byId("replica-table"), [
    { name: "replica", value: (r) => short(r.replica_id) }, { name: "version", value: (r) => short(r.version) }, { name: "state", value: (r) => (r.failed_gen ? el("span", { class: "bad" }, `refused generation ${r.failed_gen}: ${r.failed_reason}`) : r.is_converged ? "runs what is wanted" : `generation ${r.gen} of ${gen}`) },
    { name: "slots", value: (r) => Object.entries(r.slots ?? {}).map(([k, v]) => `${k} ${short(v)}`).join(", ") }, { name: "last pause ms", number: true, value: (r) => number(r.swap_pause_ms?.at(-1), 2) }, { name: "staging s", number: true, value: (r) => number(r.staging_s, 2) },
  ], rows, "No replica reports through Redis.");
}

export function showJobs(part, now) {
  const job = part.running;
  show(byId("job"), job ? el("span", { class: "busy" }, `Training ${job.arm} on ${job.bucket} since ${ago(job.since, now).replace(" ago", "")}, ordered by decision ${job.decision_id}.`) : "No training job is running.");
  table(byId("job-table"), [
    { name: "time", value: (d) => clock(d.ts) }, { name: "decision", value: (d) => link(d, `#${d.decision_id}`) }, { name: "arm", value: (d) => d.arm }, { name: "bucket", value: (d) => d.bucket }, { name: "made", value: (d) => short(d.version) },
    { name: "expected cost s", number: true, value: (d) => number(d.expected_cost_s, 1) }, { name: "cost s", number: true, value: (d) => number(d.realised_cost_s, 1) }, { name: "fall of time per token", number: true, value: (d) => (d.realised_gain ? `${number(100 * d.realised_gain, 0)}%` : "-") }, { name: "outcome", value: (d) => d.outcome ?? "-" },
  ], part.past.slice().reverse(), "No training job has ended yet.");
}
