// Page of one decision: words first, then every number.

import { ROOT, getJson } from "./api.js";
import { applyTheme, byId, clock, el, facts, number, short, show, table, whole } from "./dom.js";

applyTheme();
const id = location.pathname.split("/").filter(Boolean).at(-1);

function step(name, target) {
  const a = byId(name);
  a.hidden = target === null;
  if (target !== null) a.href = `${ROOT}/decisions/${target}`;
}

function say(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value === "number") return Number.isInteger(value) ? whole(value) : number(value, Math.abs(value) < 1 ? 4 : 2);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function fill(d) {
  document.title = `Decision ${d.decision_id} - Paceline dashboard`;
  byId("title").textContent = `Decision ${d.decision_id}: ${d.title}`;
  step("previous", d.previous);
  step("next", d.next);
  show(byId("words"), ...d.words.map((w) => el("p", {}, w)));
  table(byId("compare"), [{ name: "", value: (r) => r.what }, { name: "expected", number: true, value: (r) => say(r.expected) }, { name: "realised so far", number: true, value: (r) => say(r.realised) }], d.compare, "");
  const flat = (prefix, values) => Object.entries(values ?? {}).map(([k, v]) => [`${prefix}${k.replaceAll("_", " ")}`, say(v)]);
  facts(byId("belief"), [...flat("", d.belief), ...flat("cost: ", d.cost), ...flat("share of time: ", d.mix), ["propensity", say(d.raw.propensity)]]);
  table(byId("entries"), [{ name: "time", value: (e) => clock(e.ts) }, { name: "kind", value: (e) => e.kind }, { name: "bucket", value: (e) => e.bucket || "-" }, { name: "version", value: (e) => short(e.version) }, { name: "device-seconds", number: true, value: (e) => number(e.seconds, 3) }], d.entries.slice().reverse(), "Nothing is booked on this decision.");
  table(byId("versions"), [{ name: "version", value: (v) => short(v.version) }, { name: "parent", value: (v) => short(v.parent) }, { name: "made by", value: (v) => (v.bucket ? `${v.arm} on ${v.bucket}` : v.arm) }, { name: "rows", number: true, value: (v) => whole(v.num_train_rows) }, { name: "measured when it was made", wide: true, value: (v) => say(v.metrics) }], d.versions, "It made or changed no version.");
  byId("raw").textContent = JSON.stringify(d.raw, null, 2);
  byId("found").hidden = false;
}

try { fill(await getJson(`decisions/${encodeURIComponent(id)}`)); } catch (e) {
  byId("problem").textContent = e.status === 401 || e.status === 403 ? `${e.message}. Open the dashboard first and enter the token there.` : e.message;
  byId("problem").hidden = false;
}
