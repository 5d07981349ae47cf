// Decisions on a time line with their reasons, and what they promised against what they brought.

import { byId, clock, el, number, short, show, signed, table } from "./dom.js";
import { color } from "./theme.js";
import { date, draw, mark, plain, wrap } from "./plot.js";

const LANES = ["hold", "pin", "rollback", "recall", "train"];
const TONE = { hold: "flat", train: "busy", recall: "good", rollback: "bad", pin: "accent" };

const expectedNet = (d) => (d.expected_saving_s ?? 0) - (d.expected_cost_s ?? 0);
/** Realised net, null while nothing is known. */
export const realisedNet = (d) => (d.realised_saving_s === null && !d.realised_cost_s ? null : (d.realised_saving_s ?? 0) - (d.realised_cost_s ?? 0));
const priced = (d) => d.action === "train" || d.action === "recall";
export const link = (d, text) => el("a", { href: `/dashboard/decisions/${d.decision_id}`, "data-key": `decision-${d.decision_id}` }, text);

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
    }], { title: "Time line (hover for the reason)", shapes: (regimes?.starts ?? []).filter((t) => t > first).map((t) => mark(t, "muted", "dash")), xaxis: { type: "date", tickformat: "%H:%M" }, yaxis: { type: "category", categoryorder: "array", categoryarray: lanes.map((l) => plain(l)), range: [-0.5, lanes.length - 0.5] } }),
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
