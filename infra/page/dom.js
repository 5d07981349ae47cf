// Elements and colours: text is put on the page only as text, nothing that a client or a policy wrote is parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** A new element; `children` are elements or text. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

/** Replace the children of `node` unless they are the same as before; keeps the keyboard focus where it was. */
export function show(node, ...children) {
  const fresh = el("div", {}, ...children);
  const same = fresh.childNodes.length === node.childNodes.length && [...fresh.childNodes].every((c, i) => c.isEqualNode(node.childNodes[i]));
  if (same) return;
  const focused = node.contains(document.activeElement) ? document.activeElement.getAttribute("data-key") : null;
  node.replaceChildren(...fresh.childNodes);
  if (focused) [...node.querySelectorAll("[data-key]")].find((n) => n.getAttribute("data-key") === focused)?.focus();
}

/** Fill a <table>: `columns` are {name, value(row), number?, wide?}; value gives text or an element. */
export function table(node, columns, rows, empty) {
  const cls = (c) => (c.number ? "number" : c.wide ? "wide" : null);
  if (!rows.length) return show(node, el("tbody", {}, el("tr", {}, el("td", {}, empty))));
  const head = el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { class: cls(c), scope: "col" }, c.name))));
  const body = el("tbody", {}, ...rows.map((r) => el("tr", {}, ...columns.map((c) => el("td", { class: cls(c) }, c.value(r) ?? "-")))));
  show(node, head, body);
}

/** Fill a <dl> from [name, text] pairs. */
export function facts(node, pairs) {
  show(node, ...pairs.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v instanceof Node ? v : String(v)))));
}

/** Keep a <select>'s options equal to `values` without losing the choice; `labels` may name them. */
export function options(select, values, labels = {}) {
  const fresh = values.map((v) => el("option", { value: v }, labels[v] ?? v)), now = [...select.options];
  if (now.length === fresh.length && now.every((o, i) => o.isEqualNode(fresh[i]))) return;
  const chosen = select.value;
  select.replaceChildren(...fresh);
  if (values.includes(chosen)) select.value = chosen;
}

export const number = (v, digits = 2) => (v === null || v === undefined ? "-" : v.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }));
export const whole = (v) => (v === null || v === undefined ? "-" : Math.round(v).toLocaleString("en"));
export const signed = (v, digits = 1) => (v === null || v === undefined ? "-" : (v > 0 ? "+" : "") + number(v, digits));
export const short = (version) => (version || "none").slice(0, 12);
/** The time, with its day unless that is today's. */
export function clock(ts) {
  if (!ts) return "-";
  const at = new Date(ts * 1000), time = at.toLocaleTimeString("en", { hour12: false });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en", { month: "short", day: "numeric" })}, ${time}`;
}

/** '12 s ago', '4 min ago'. */
export function ago(ts, now) {
  if (!ts) return "";
  const s = Math.max(0, Math.round(now - ts));
  return s < 90 ? `${s} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;
}

// Light or dark: as the system says, unless the switch says otherwise.
const KEY = "paceline-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme() {
  const chosen = localStorage.getItem(KEY) || "auto";
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  return chosen;
}

/** Wire the switch; `changed` runs whenever colours change. */
export function themeSwitch(select, changed) {
  select.value = applyTheme();
  select.addEventListener("change", () => { localStorage.setItem(KEY, select.value); applyTheme(); changed(); });
  system.addEventListener("change", changed);
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
