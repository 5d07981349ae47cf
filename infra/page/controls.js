// Controls: what an operator may change. Commands go with the admin token; without it every control is off.

import { command, getJson, token } from "./api.js";
import { byId, options, short } from "./dom.js";

export class Controls {
  constructor(unlocked) {
    this.unlocked = unlocked;
    this.isAdmin = this.isUnlocking = false;
    byId("admin-form").addEventListener("submit", (e) => { e.preventDefault(); this.unlock(byId("admin-token").value.trim()); byId("admin-token").value = ""; });
    byId("lock").addEventListener("click", () => { token.set(""); this.unlocked(); this.check(); });
    const on = (id, event, name, body = () => ({})) => byId(id).addEventListener(event, (e) => { e.preventDefault(); this.send(typeof name === "function" ? name() : name, body()); });
    on("pause", "click", () => byId("pause").dataset.command);
    on("unpin", "click", "unpin");
    on("rollback", "click", "rollback");
    on("pin-form", "submit", "pin", () => ({ version: byId("pin-version").value }));
    on("train-form", "submit", "train", () => ({ bucket: byId("train-bucket").value, arm: byId("train-arm").value }));
    on("policy-form", "submit", "policy", () => ({ policy: byId("policy").value }));
    on("bank-form", "submit", "bank", () => ({ bank_s: Number(byId("bank").value) }));
  }
  /** Try a token; one that is not the operators' takes no viewer's token away, where there is one. */
  async unlock(tried) {
    if (this.isUnlocking) return;
    this.isUnlocking = true;
    try { await this.tryToken(tried); } finally { this.isUnlocking = false; }
  }
  async tryToken(tried) {
    const before = token.get();
    token.set(tried);
    const error = await this.check();
    const isOther = error === null || error.status === 401;
    this.say(this.isAdmin ? "Unlocked." : isOther ? "That is not the admin token." : error.message, !this.isAdmin);
    if (this.isAdmin || !before) { this.unlocked(); return; }
    token.set(before);
    await this.check();
  }
  /** Ask whether the token is the operators'; what went wrong, if something did. */
  async check() {
    let session = { is_admin: false, has_admin_token: true }, error = null;
    try { session = await getJson("session"); } catch (e) { error = e; }
    this.isAdmin = session.is_admin;
    byId("commands").hidden = byId("commands").disabled = !session.is_admin;
    byId("lock").hidden = !token.get();
    byId("admin-form").hidden = !session.has_admin_token;
    byId("controls-text").textContent = session.has_admin_token
      ? (session.is_admin ? "Every command is written to the decision log." : "Reading only. Enter the admin token to pause, pin, roll back, train or change the policy.")
      : "Reading only: start the service with --admin-token (or PACELINE_ADMIN_TOKEN) to have controls here.";
    return error;
  }
  show(parts) {
    const head = parts.head, versions = parts.versions ?? [];
    byId("controls").hidden = !head.is_adaptive; // there is no controller to command
    const pause = byId("pause");
    pause.dataset.command = head.is_paused ? "resume" : "pause";
    pause.textContent = head.is_paused ? "Resume decisions" : "Pause decisions";
    byId("unpin").disabled = !head.pinned;
    options(byId("pin-version"), versions.map((v) => v.version).reverse(), Object.fromEntries(versions.map((v) => [v.version, `${short(v.version)} ${v.roles.join(", ")} ${v.bucket ? `${v.arm} on ${v.bucket}` : v.arm}`])));
    options(byId("train-bucket"), (parts.buckets ?? []).map((b) => b.bucket));
    options(byId("train-arm"), head.arms);
    if (!byId("policy").options.length) { options(byId("policy"), head.policies); byId("policy").value = head.policy; }
  }
  async send(name, body) {
    this.say(`${name}: sent`, false);
    try {
      const done = await command(name, body);
      this.say(`${name}: done. Generation ${done.gen}, live ${short(done.version)}, policy ${done.policy}${done.is_paused ? ", paused" : ""}.`, false);
    } catch (e) { this.say(`${name}: ${e.message}`, true); }
  }
  say(text, isBad) { const node = byId("command-result"); node.textContent = text; node.className = isBad ? "bad" : "good"; }
}
