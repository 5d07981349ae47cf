// Traffic: acceptance length and speed per bucket, adaptive, hold-back, plain and the version on trial side by side, regimes and swaps marked.

import { getJson } from "./api.js";
import { byId, color, el, number, options, show, table, whole } from "./dom.js";
import { TIME, date, draw, mark, plain } from "./plot.js";

const GROUPS = ["adaptive", "static", "plain"];
const NAMES = { adaptive: "adaptive (its class's version)", static: "hold-back (first drafter)", plain: "plain (no drafter)", canary: "canary (version on trial)" };
const DASH = { adaptive: "solid", static: "dash", plain: "dot", canary: "dashdot" };
const POOL_S = 30;
const LIVE_S = 1200;
const HISTORY_S = 60; // what is older changes once a minute
const MAX_SHOWN = 3;

/** The roll-out while a version is on trial, else null. */
const onTrial = (parts) => (parts.rollout?.rollout?.status === "canary" ? parts.rollout.rollout : null);
const shownGroups = (trial) => (trial ? [...GROUPS, "canary"] : GROUPS);

/** Acceptance length (value 0: weighted by rounds) or speed (value 1: all tokens over all device time) of several bins. */
function pooled(cells, value) {
  let above = 0, below = 0;
  for (const cell of cells) {
    if (cell === null || cell[value] === null) continue;
    const [length, speed, tokens, rounds] = cell;
    above += value === 0 ? length * rounds : tokens;
    below += value === 0 ? rounds : tokens / speed;
  }
  return below > 0 ? above / below : null;
}

export class Traffic {
  constructor(redraw) {
    this.bins = new Map();
    this.history = [];
    this.readAt = -Infinity;
    this.redraw = redraw;
    byId("bucket").addEventListener("change", redraw);
    byId("range").addEventListener("change", redraw);
  }
  /** The bins to show, oldest first, the open one left out; what the stream does not bring is asked for, and drawn when it is there. */
  shown(now) {
    const range = Number(byId("range").value);
    if (range > LIVE_S && now - this.readAt >= HISTORY_S) {
      this.readAt = now;
      getJson("history").then((bins) => { this.history = bins; this.redraw(); }, (e) => { this.readAt = -Infinity; console.error("the history could not be read", e); });
    }
    const live = [...this.bins.values()].sort((a, b) => a.ts - b.ts);
    const old = range > LIVE_S ? this.history.filter((bin) => !live.length || bin.ts + bin.seconds <= live[0].ts) : [];
    return [...old, ...live].filter((bin) => bin.ts >= now - range && bin.ts + bin.seconds <= now);
  }
  /** Take new or changed time bins; the ring is as long as the server's. */
  take(bins) {
    for (const bin of bins) this.bins.set(bin.ts, bin);
    const old = [...this.bins.keys()].sort((a, b) => a - b).slice(0, -240);
    for (const ts of old) this.bins.delete(ts);
    return bins.length > 0;
  }
  /** Lines of one bucket, each point pooled over the POOL_S before it or the bin, if that is longer; a gap where a group had no rounds.
      `trial` is the roll-out while a version is on trial, else null: its line begins with it. */
  lines(bucket, value, now, trial) {
    const isPause = (before, bin) => before !== undefined && before.ts + before.seconds + POOL_S <= bin.ts; // there are no bins in it
    const bins = this.shown(now).flatMap((bin, i, all) => (isPause(all[i - 1], bin) ? [{ ts: bin.ts, seconds: 0, buckets: {} }, bin] : [bin]));
    const first = (i) => { let at = i; while (at > 0 && bins[at - 1].ts >= bins[i].ts + bins[i].seconds - POOL_S) at -= 1; return at; };
    return shownGroups(trial).map((group) => {
      const isShown = (bin) => group !== "canary" || bin.ts + bin.seconds > trial.since;
      const cells = bins.map((bin) => (isShown(bin) ? bin.buckets[bucket]?.[group] ?? null : null));
      const y = cells.map((cell, i) => (cell === null ? null : pooled(cells.slice(first(i), i + 1), value)));
      return { group, x: bins.map((bin) => date(bin.ts + bin.seconds)), y };
    }).filter((line) => line.y.some((v) => v !== null));
  }
  async draw(parts, now) {
    const rows = parts.buckets ?? [];
    options(byId("bucket"), ["", ...rows.map((r) => r.bucket)], { "": "busiest" });
    const chosen = byId("bucket").value;
    const shown = chosen ? [chosen] : rows.slice(0, MAX_SHOWN).map((r) => r.bucket);
    const trial = onTrial(parts);
    const marks = { regime: "the traffic changed", decision: "a decision acted", swap: "a version was swapped in" };
    show(byId("legend"), ...shownGroups(trial).map((g) => el("span", { class: `key ${g}` }, NAMES[g])), ...Object.entries(marks).map(([k, text]) => el("span", { class: `key line ${k}` }, text)));
    this.table(rows, trial);
    this.drafting(rows, parts.head?.num_buckets);
    const place = byId("buckets");
    if (!shown.length) return show(place, el("p", { class: "hint" }, parts.head?.is_adaptive === false ? "Where nothing adapts no traffic is measured by bucket; /metrics has its sums." : "No traffic has been measured yet: send requests to /v1/completions."));
    if (JSON.stringify(shown) !== place.dataset.shown || !place.querySelector(".pair")) {
      place.dataset.shown = JSON.stringify(shown);
      place.replaceChildren(...shown.map((b) => el("div", {}, el("h3", {}, b), el("div", { class: "pair" }, el("div", { class: "chart", role: "img", "aria-label": `Acceptance length of ${b}` }), el("div", { class: "chart", role: "img", "aria-label": `Speed of ${b}` })))));
    }
    const first = this.shown(now)[0]?.ts ?? now;
    const shapes = [
      ...(parts.regimes?.starts ?? []).filter((ts) => ts > first).map((ts) => mark(ts, "muted", "dash")),
      ...(parts.swaps?.times ?? []).filter((ts) => ts > first).map((ts) => mark(ts, "good", "solid")),
      ...(parts.decisions?.rows ?? []).filter((d) => d.action !== "hold" && d.ts > first).map((d) => mark(d.ts, "busy", "dot")),
    ];
    const charts = place.querySelectorAll(".chart");
    await Promise.all(shown.flatMap((b, i) => [
      this.chart(charts[2 * i], b, 0, "Acceptance length, tokens per round (30 s)", shapes, now, trial),
      this.chart(charts[2 * i + 1], b, 1, "Tokens per second of device time (30 s)", shapes, now, trial),
    ]));
  }
  chart(node, bucket, value, title, shapes, now, trial) {
    const traces = this.lines(bucket, value, now, trial).filter((l) => value === 1 || l.group !== "plain").map((l) => ({
      type: "scatter", mode: "lines+markers", name: NAMES[l.group], x: l.x, y: l.y, connectgaps: false, marker: { color: color(l.group), size: 4 },
      line: { color: color(l.group), dash: DASH[l.group], width: 2, shape: "linear" }, hovertemplate: `${plain(bucket)}, ${l.group}: %{y:.2f}<extra></extra>`, meta: { bucket, group: l.group },
    }));
    return draw(node, traces, { title, shapes, xaxis: TIME, yaxis: { rangemode: value === 1 ? "tozero" : "normal" } });
  }
  /** Where the engine of this replica drafts, in a sentence. */
  drafting(rows, total) {
    const known = rows.filter((r) => Object.keys(r.speculation ?? {}).length);
    const off = known.filter((r) => !Object.values(r.speculation).some((on) => on)).map((r) => r.bucket);
    const names = off.slice(0, MAX_SHOWN).join(", ") + (off.length > MAX_SHOWN ? ` and ${off.length - MAX_SHOWN} more` : "");
    const busiest = total > rows.length ? `the ${known.length} busiest of ${total} buckets` : "";
    show(byId("drafting"), !known.length ? "" : !off.length ? `Drafting is on for ${busiest || `${known.length === 1 ? "the one bucket" : `all ${known.length} buckets`} with traffic`}.`
      : el("span", { class: "busy" }, `Drafting is off for ${off.length} of ${busiest || `${known.length} buckets`}: it loses there (${names}).`));
  }
  table(rows, trial) {
    const cell = (group, key, digits) => ({ name: `${group} ${key === "tokens_per_s" ? "tok/s" : "accept."}`, number: true, value: (r) => number(r.recent?.[group]?.[key], digits) });
    const gain = (r) => { const a = r.recent?.adaptive?.tokens_per_s, s = r.recent?.static?.tokens_per_s; return a && s ? `${number(a / s)}x` : "-"; };
    table(byId("bucket-table"), [
      { name: "bucket", value: (r) => r.bucket }, cell("adaptive", "acceptance_length", 2), cell("static", "acceptance_length", 2), cell("adaptive", "tokens_per_s", 0),
      cell("static", "tokens_per_s", 0), cell("plain", "tokens_per_s", 0),
      ...(trial ? [cell("canary", "acceptance_length", 2), cell("canary", "tokens_per_s", 0)] : []), { name: "adaptive / hold-back", number: true, value: gain },
      { name: "drafting", value: (r) => Object.entries(r.speculation ?? {}).map(([role, on]) => `${role} ${on ? "on" : "off"}`).join(", ") || "-" },
      { name: "tokens, 30 s", number: true, value: (r) => whole(r.recent_tokens) }, { name: "rows to learn from", number: true, value: (r) => whole(r.rows) },
      { name: "share of unnamed requests", number: true, value: (r) => (r.class_share == null ? "-" : `${whole(100 * r.class_share)}%`) },
    ], rows, "No traffic has been measured yet.");
  }
}
