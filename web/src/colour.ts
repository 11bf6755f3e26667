// Colours. Lines are those of Okabe and Ito, heat is blue inside the limit and orange beyond it, maps
// are cividis: all can be told apart by readers who do not see red and green as two colours.

export function dark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  if (chosen) return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

type RGB = [number, number, number];

function mixed(stops: [number, RGB][], at: number): RGB {
  if (at <= stops[0][0]) return stops[0][1];
  for (let i = 1; i < stops.length; i++) {
    const [end, colour] = stops[i];
    if (at <= end) {
      const [begin, before] = stops[i - 1];
      const t = (at - begin) / (end - begin);
      return [0, 1, 2].map((c) => Math.round(before[c] + (colour[c] - before[c]) * t)) as RGB;
    }
  }
  return stops[stops.length - 1][1];
}

// By log10 of the value over its limit.
const LIGHT: [number, RGB][] = [
  [-3, [241, 245, 250]],
  [-1, [198, 219, 239]],
  [-0.0001, [150, 187, 219]],
  [0, [249, 196, 132]],
  [0.4, [240, 140, 60]],
  [1, [200, 70, 12]],
  [2, [138, 36, 4]],
];
const DARK: [number, RGB][] = [
  [-3, [30, 38, 48]],
  [-1, [38, 66, 96]],
  [-0.0001, [52, 98, 146]],
  [0, [138, 74, 22]],
  [0.4, [191, 98, 28]],
  [1, [232, 126, 48]],
  [2, [255, 186, 120]],
];

/** Background and text of a heat cell; black or white, whichever is clearer, is 4.58 or more. */
export function heat(severity: number): { back: string; ink: string } {
  const at = severity <= 0 ? -3 : Number.isFinite(severity) ? Math.log10(severity) : 2;
  const back = mixed(dark() ? DARK : LIGHT, Math.max(-3, Math.min(2, at)));
  return { back: `rgb(${back.join(" ")})`, ink: luminance(back) > 0.179 ? "#000" : "#fff" };
}

function luminance([r, g, b]: RGB): number {
  const [x, y, z] = [r, g, b].map((c) => {
    const v = c / 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}

const CIVIDIS: [number, RGB][] = [
  [0, [0, 32, 77]],
  [0.15, [11, 52, 109]],
  [0.3, [61, 79, 108]],
  [0.45, [95, 104, 113]],
  [0.6, [134, 131, 119]],
  [0.75, [178, 161, 111]],
  [0.9, [226, 197, 85]],
  [1, [255, 234, 70]],
];

export function cividis(at: number): RGB {
  return mixed(CIVIDIS, Math.max(0, Math.min(1, at)));
}

export function cividisGradient(): string {
  return `linear-gradient(90deg, ${CIVIDIS.map(([at, c]) => `rgb(${c.join(" ")}) ${at * 100}%`).join(", ")})`;
}

export function heatGradient(): string {
  const stops = dark() ? DARK : LIGHT;
  return `linear-gradient(90deg, ${stops.map(([at, c]) => `rgb(${c.join(" ")}) ${((at + 3) / 5) * 100}%`).join(", ")})`;
}

const LINES_LIGHT = ["#0b63a5", "#00735a", "#a8437f", "#7a5c00", "#31688e", "#8a3b12", "#555555", "#5c4d9a", "#3d6b1f", "#7d2f4b"];
const LINES_DARK = ["#56b4e9", "#2fc59b", "#e393c4", "#e6b53c", "#9cc4ff", "#f0a06a", "#bbbbbb", "#b9a8f5", "#9ccf73", "#f08aa8"];

export function lineColour(at: number): string {
  const colours = dark() ? LINES_DARK : LINES_LIGHT;
  return colours[at % colours.length];
}

export function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
