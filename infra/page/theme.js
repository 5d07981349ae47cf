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
