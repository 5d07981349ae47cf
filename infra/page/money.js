// The ledger over time and split, and what is believed of every training arm.

import { byId, options } from "./dom.js";
import { color } from "./theme.js";
import { date, draw, plain } from "./plot.js";

export async function drawLedger(part) {
  const { ts, spent_s, saved_s, net_s } = part.lines;
  const line = (name, y, tone, dash) => ({ type: "scatter", mode: "lines", name, x: ts.map(date), y, line: { color: color(tone), dash, width: name === "net" ? 3 : 1.5, shape: "hv" }, hovertemplate: `${name}: %{y:.1f} s<extra></extra>` });
  const none = [{ text: "nothing is booked yet", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
  const by = part.by[byId("split").value] ?? [];
  const bars = (name, key, tone, sign) => ({ type: "bar", orientation: "h", name, y: by.map((r) => plain(r.name, 26)), x: by.map((r) => sign * r[key]), marker: { color: color(tone) }, hovertemplate: `%{y}: %{x:.2f} s ${name}<extra></extra>` });
  const legend = { showlegend: true, legend: { orientation: "h", y: -0.15 } };
  await Promise.all([
    draw(byId("ledger"), [line("saved", saved_s, "good", "dash"), line("spent", spent_s, "bad", "dot"), line("net", net_s, "adaptive", "solid")], { title: "Device-seconds since the beginning", ...legend, annotations: ts.length ? [] : none, xaxis: { type: "date", tickformat: "%H:%M", visible: ts.length > 0 }, yaxis: { ticksuffix: " s" } }),
    draw(byId("ledger-by"), [bars("saved", "saved_s", "good", 1), bars("spent", "spent_s", "bad", -1)], { title: `Saved (right) and spent (left) by ${byId("split").value}`, barmode: "relative", ...legend, annotations: by.length ? [] : none, xaxis: { visible: by.length > 0, ticksuffix: " s" }, yaxis: { type: "category", autorange: "reversed" } }),
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
