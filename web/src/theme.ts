// Light, dark, or as the system has it.

import { h, kept } from "./dom";

const ORDER = ["auto", "light", "dark"] as const;
const SHOWN = { auto: "◐ auto", light: "○ light", dark: "● dark" };

export function themeButton(changed: () => void): HTMLElement {
  let at = Math.max(0, ORDER.indexOf((kept("theme") ?? "auto") as "auto"));
  const button = h("button", { type: "button", class: "theme" });
  const apply = () => {
    const now = ORDER[at];
    if (now === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = now;
    button.textContent = SHOWN[now];
    button.setAttribute("aria-label", `Colours: ${now}. Change`);
  };
  apply();
  button.addEventListener("click", () => {
    at = (at + 1) % ORDER.length;
    kept("theme", ORDER[at]);
    apply();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  return button;
}
