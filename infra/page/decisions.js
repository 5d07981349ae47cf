// Decisions with their reasons and what they brought, the ledger that they are booked in, and what is believed of every arm.

import { ROOT } from "./api.js";
import { byId, clock, color, el, number, options, short, show, signed, table } from "./dom.js";
import { TIME, date, draw, mark, plain, wrap } from "./plot.js";

const LANES = ["hold", "pin", "rollback", "recall", "train"];
const TONE = { hold: "flat", train: "busy", recall: "good", rollback: "bad", pin: "accent" };

const expectedNet = (d) => (d.expected_saving_s ?? 0) - (d.expected_cost_s ?? 0);
/** Realised net, null while nothing is known. */
const realisedNet = (d) => (d.realised_saving_s === null && !d.realised_cost_s ? null : (d.realised_saving_s ?? 0) - (d.realised_cost_s ?? 0));
const priced = (d) => d.action === "train" || d.action === "recall";
export const link = (d, text) => el("a", { href: `${ROOT}/decisions/${d.decision_id}`, "data-key": `decision-${d.decision_id}` }, text);

export async function drawDecisions(part, regimes) {
  const rows = part.rows;
  const lanes = [...LANES, ...new Set(rows.map((d) => d.action).filter((a) => !LANES.includes(a)))];
  const acted = rows.filter(priced).slice(-10);
  decisionTable(rows);
  const first = rows.length ? rows[0].ts : 0;
  await Promise.all([
    draw(byId("timeline"), [{
      type: "scatter", mode: "markers", x: rows.map((d) => date(d.ts)), y: rows.map((d) => plain(d.action)), text: rows.map((d) => `${plain(d.title)}, ${clock(d.ts)}<br>${wrap(d.reason)}`),
      hovertemplate: "%{text}<extra></extra>", marker: { size: 11, color: rows.map((d) => color(TONE[d.action] ?? "accent")), symbol: rows.map((d) => (d.action === "hold" ? "circle-open" : "diamond")) }, meta: { ids: rows.map((d) => d.decision_id) },
    }], { title: "Time line (hover for the reason)", shapes: (regimes?.starts ?? []).filter((t) => t > first).map((t) => mark(t, "muted", "dash")), xaxis: TIME, yaxis: { type: "category", categoryorder: "array", categoryarray: lanes.map((l) => plain(l)), range: [-0.5, lanes.length - 0.5] } }),
    draw(byId("expected"), [
      bar("expected", acted, expectedNet, "plain"), bar("realised so far", acted, realisedNet, "adaptive"),
    ], { title: "Net device-seconds: expected and realised so far", barmode: "group", showlegend: true, legend: { orientation: "h", y: -0.15 }, yaxis: { type: "category", autorange: "reversed" },
      annotations: acted.length ? [] : [{ text: "nothing was trained or recalled yet", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }], xaxis: { visible: acted.length > 0 } }),
  ]);
}

const bar = (name, rows, value, tone) => ({ type: "bar", orientation: "h", name, y: rows.map((d) => plain(`#${d.decision_id} ${d.title}`, 34)), x: rows.map(value), marker: { color: color(tone) }, hovertemplate: "%{y}: %{x:.1f} s<extra></extra>" });

function decisionTable(rows) {
  const shown = (byId("show-holds").checked ? rows : rows.filter((d) => d.action !== "hold")).slice().reverse().slice(0, 40);
  const net = (d) => { const v = realisedNet(d); return v === null ? "-" : el("span", { class: v > 0 ? "good" : v < 0 ? "bad" : null }, signed(v)); };
  table(byId("decision-table"), [
    { name: "time", value: (d) => clock(d.ts) }, { name: "decision", value: (d) => link(d, `#${d.decision_id} ${d.title}`) }, { name: "why", wide: true, value: (d) => d.reason },
    { name: "expected net s", number: true, value: (d) => (priced(d) ? signed(expectedNet(d)) : "-") }, { name: "cost s", number: true, value: (d) => number(d.realised_cost_s, 1) },
    { name: "saved s", number: true, value: (d) => number(d.realised_saving_s, 1) }, { name: "net so far s", number: true, value: net },
    { name: "outcome", value: (d) => (d.outcome ? `${d.outcome}${d.version ? ` ${short(d.version)}` : ""}` : d.action === "train" ? "running" : "-") },
  ], shown, rows.length ? "Only holds so far: tick the box to see them." : "Nothing was decided yet.");
}

export function showNotes(notes) {
  show(byId("notes"), ...(notes.length ? notes.slice().reverse().map((n) => el("li", {}, `${clock(n.ts)} ${n.text}`)) : [el("li", {}, "none yet")]));
}

export async function drawLedger(part) {
  const { ts, spent_s, saved_s, net_s } = part.lines;
  const line = (name, y, tone, dash) => ({ type: "scatter", mode: "lines", name, x: ts.map(date), y, line: { color: color(tone), dash, width: name === "net" ? 3 : 1.5, shape: "hv" }, hovertemplate: `${name}: %{y:.1f} s<extra></extra>` });
  const none = [{ text: "nothing is booked yet", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
  const by = part.by[byId("split").value] ?? [], names = by.map((r) => plain(r.name, 200));
  const bars = (name, key, tone, sign) => ({ type: "bar", orientation: "h", name, y: names, x: by.map((r) => sign * r[key]), marker: { color: color(tone) }, hovertemplate: `%{y}: %{x:.2f} s ${name}<extra></extra>` });
  const legend = { showlegend: true, legend: { orientation: "h", y: -0.15 } };
  await Promise.all([
    draw(byId("ledger"), [line("saved", saved_s, "good", "dash"), line("spent", spent_s, "bad", "dot"), line("net", net_s, "adaptive", "solid")], { title: "Device-seconds since the beginning", ...legend, annotations: ts.length ? [] : none, xaxis: { ...TIME, visible: ts.length > 0 }, yaxis: { ticksuffix: " s" } }),
    draw(byId("ledger-by"), [bars("saved", "saved_s", "good", 1), bars("spent", "spent_s", "bad", -1)], { title: `Saved (right) and spent (left) by ${byId("split").value}`, barmode: "relative", ...legend, annotations: by.length ? [] : none, xaxis: { visible: by.length > 0, ticksuffix: " s" }, yaxis: { type: "category", autorange: "reversed", tickvals: names, ticktext: by.map((r) => plain(r.name, 26)) } }),
  ]);
}

export async function drawPosterior(rows) {
  const buckets = [...new Set(rows.map((r) => r.bucket).filter((b) => b !== null))].sort();
  options(byId("posterior-bucket"), ["", ...buckets], { "": "all" });
  const chosen = byId("posterior-bucket").value || null;
  const mine = rows.filter((r) => r.bucket === chosen);
  const dots = (name, mean, low, high, tone, symbol) => ({
    type: "scatter", mode: "markers", name, x: mine.map((r) => 100 * r[mean]), y: mine.map((r) => plain(r.arm)), marker: { color: color(tone), size: 10, symbol },
    error_x: { type: "data", symmetric: false, array: mine.map((r) => 100 * (r[high] - r[mean])), arrayminus: mine.map((r) => 100 * (r[mean] - r[low])), color: color(tone), thickness: 2, width: 6 }, hovertemplate: "%{y}: %{x:.0f}%<extra></extra>",
  });
  await draw(byId("posterior"), [dots("before any job", "prior_mean", "prior_low", "prior_high", "plain", "circle-open"), dots("now (90% interval)", "mean", "low", "high", "adaptive", "circle")], {
    title: "Share of the reachable gain that an arm closes", showlegend: true, legend: { orientation: "h", y: -0.2 }, scattermode: "group", yaxis: { type: "category" }, xaxis: { ticksuffix: "%", visible: mine.length > 0 },
    annotations: mine.length ? [] : [{ text: "no arm was priced yet: a bucket needs enough rows first", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }],
  });
}
