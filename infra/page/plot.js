// Charts: Plotly from this origin, colours from the style sheet, every label escaped.

import { ROOT } from "./api.js";
import { color } from "./dom.js";

let loading = null;

/** Load plotly.min.js once; the page shows its words before that. */
export function loadPlotly() {
  loading ??= fetch(`${ROOT}/static/plotly.json`).then((r) => r.json()).then((facts) => new Promise((resolve, reject) => {
    for (const id of facts.style_ids) document.head.append(Object.assign(document.createElement("meta"), { id })); // no inline styles for maps
    const script = document.createElement("script");
    script.src = `${ROOT}/static/plotly.min.js?v=${facts.version}`;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("plotly.min.js could not be loaded"));
    document.head.append(script);
  }));
  return loading;
}

/** Text for Plotly, which reads a little HTML in labels: escaped, and cut so that one name cannot fill a chart. */
export function plain(text, limit = 60) {
  const s = String(text);
  const cut = s.length > limit ? `${s.slice(0, limit - 1)}…` : s;
  return cut.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** A sentence in lines of about `width` characters, for hover labels. */
export function wrap(text, width = 60) {
  const lines = [""];
  for (const word of String(text).slice(0, 600).split(" ")) {
    if ((lines.at(-1) + word).length > width && lines.at(-1)) lines.push("");
    lines[lines.length - 1] += `${word} `;
  }
  return lines.map((l) => plain(l.trim(), width * 2)).join("<br>");
}

export const date = (ts) => new Date(ts * 1000);

/** A vertical line through the whole chart at a time. */
export const mark = (ts, name, dash = "dot") => ({ type: "line", xref: "x", yref: "paper", x0: date(ts), x1: date(ts), y0: 0, y1: 1, line: { color: color(name), width: 1, dash } });

/** An axis of times: no two labels are alike, however short or long it is. */
export const TIME = { type: "date", tickformatstops: [{ dtickrange: [null, 59999], value: "%H:%M:%S" }, { dtickrange: [60000, 21599999], value: "%H:%M" }, { dtickrange: [21600000, null], value: "%b %-d, %H:%M" }] };

/** Draw or update a chart; waits for Plotly. `layout` is merged over the common one, axes deeply. */
export async function draw(node, traces, layout = {}) {
  const Plotly = await loadPlotly();
  const axis = { gridcolor: color("grid"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true, tickfont: { size: 12 } };
  const whole = {
    height: node.classList.contains("small") ? 190 : 270, margin: { l: 8, r: 12, t: 30, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("text"), family: "system-ui, sans-serif", size: 12.5 }, hoverlabel: { align: "left", bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("text") } },
    showlegend: false, uirevision: "keep", hovermode: "closest", dragmode: "pan", ...layout,
    title: { text: layout.title ?? "", font: { size: 13.5 }, x: 0, xanchor: "left", y: 0.98, yanchor: "top" },
    xaxis: { ...axis, ...(layout.xaxis ?? {}) }, yaxis: { ...axis, ...(layout.yaxis ?? {}) },
  };
  node.removeAttribute("role"); // a drawn chart is no image any more: its hover layer is reachable
  return Plotly.react(node, traces, whole, { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" });
}
