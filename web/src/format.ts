// Numbers as a person reads them.

const MINUS = "−";

export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

/** Three digits: 0.167, 1.67e−7, 12 300, ∞. */
export function fig(value: number | null | undefined): string {
  if (value === null || value === undefined) return "";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text: string;
  if (Number.isInteger(value) && size < 1e7) text = count(value);
  else if (size >= 1e-3 && size < 1e5) text = String(Number(value.toPrecision(3)));
  else text = value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return text.replaceAll("-", MINUS);
}

/** A cosine near 1 says nothing in three digits. */
export function cosine(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return fig(value);
  if (value === 1) return "1";
  if (value > 0.9999) return `1 ${MINUS} ${fig(1 - value)}`;
  return value.toFixed(5).replace("-", MINUS);
}

export function metricFigure(name: string, value: number | null | undefined): string {
  return name === "cosine" || name === "cos_sim" ? cosine(value) : fig(value);
}

/** How many times its limit: 3.3×, 0.02×. */
export function times(value: number | null | undefined): string {
  if (value === null || value === undefined) return "";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : "∞×";
  if (value === 0) return "0×";
  if (value < 0.001) return "<0.001×";
  if (value < 1 && value > 0.995) return "0.99×"; // what is inside must not read as the limit
  if (value > 1 && value < 1.05) return `${Math.max(1.01, Number(value.toPrecision(3)))}×`;
  return `${Number(value.toPrecision(2)) >= 1000 ? value.toExponential(1).replace("e+", "e") : Number(value.toPrecision(2))}×`;
}

export function percent(value: number): string {
  if (!Number.isFinite(value)) return "";
  if (value === 0) return "0 %";
  const shown = value * 100;
  if (value < 1 && shown > 99) return shown > 99.99 ? "over 99.99 %" : `${Math.floor(shown * 100) / 100} %`;
  return `${shown >= 10 ? Math.round(shown) : Number(shown.toPrecision(2))} %`;
}

/** 1 batch, 2 batches; 1 token, 2 tokens. */
export function plural(value: number, word: string): string {
  const many = /(s|x|z|ch|sh)$/.test(word) ? `${word}es` : `${word}s`;
  return `${count(value)} ${value === 1 ? word : many}`;
}
