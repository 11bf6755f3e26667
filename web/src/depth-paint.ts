// What stands behind and before the lines of the chart.

import type uPlot from "uplot";
import type { Line } from "./source";
import type { State } from "./state";
import { dark, style } from "./colour";

export interface Drawn {
  name: string;
  label: string;
  /** What is drawn: an error that grows upwards and is positive. */
  of: (value: number) => number;
}

export interface Picture {
  shown: Drawn[];
  line: Line;
  /** Row numbers along x, and the index of each in the line of the data. */
  places: number[];
  marks: number[];
  state: State;
  colourOf: (metric: Drawn) => string;
  placeOf: (row: number, site: string) => number;
}

/** First and last place that can be seen. */
export function inView(u: uPlot, count: number): [number, number] {
  const low = Math.max(0, Math.floor(u.scales.x.min ?? 0));
  const high = Math.min(count - 1, Math.ceil(u.scales.x.max ?? 0));
  return [low, high];
}

/** Noise bands, behind the lines. */
export function paintUnder(u: uPlot, { shown, places, line, marks, colourOf }: Picture): void {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const metric of shown) {
    const band = line.noise[metric.name];
    if (!band) continue;
    ctx.fillStyle = colourOf(metric);
    ctx.globalAlpha = dark() ? 0.27 : 0.15;
    const bottom = bbox.top + bbox.height;
    const [from, to] = inView(u, places.length);
    let run: [number, number, number][] = [];
    const paint = () => {
      if (run.length) {
        ctx.beginPath();
        run.forEach(([x, high], i) => (i ? ctx.lineTo(x, high) : ctx.moveTo(x, high)));
        for (let i = run.length - 1; i >= 0; i--) ctx.lineTo(run[i][0], run[i][2]);
        ctx.closePath();
        ctx.fill();
      }
      run = [];
    };
    for (let k = from; k <= to; k++) {
      const pair = [metric.of(band.low[marks[k]]), metric.of(band.high[marks[k]])];
      const high = Math.max(...pair.filter((v) => !Number.isNaN(v)));
      const low = Math.min(...pair);
      if (!(high > 0) || !Number.isFinite(high)) {
        paint();
        continue;
      }
      run.push([
        u.valToPos(k, "x", true),
        u.valToPos(high, "y", true),
        low > 0 ? u.valToPos(low, "y", true) : bottom,
      ]);
    }
    paint();
  }
  ctx.restore();
}

/** Limits, failing points, the first divergence and what is chosen, before the lines. */
export function paintOver(u: uPlot, { shown, places, state, colourOf, placeOf }: Picture): void {
const { ctx, bbox } = u;
const { rows, data, choice } = state;
  const ratio = devicePixelRatio;
  const bad = style("--bad");
  ctx.save();
  ctx.lineWidth = 1.25 * ratio;
  const [from, to] = inView(u, places.length);
  for (const metric of shown) {
    ctx.strokeStyle = colourOf(metric);
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.beginPath();
    let on = false;
    for (let k = from; k <= to; k++) {
      const row = places[k];
      const limit = rows.decidedBy(row) === metric.name ? metric.of(rows.limit(row) ?? NaN) : NaN;
      if (!(limit > 0)) {
        on = false;
        continue;
      }
      const y = u.valToPos(limit, "y", true);
      const [left, right] = [u.valToPos(Math.max(k - 0.5, u.scales.x.min!), "x", true), u.valToPos(Math.min(k + 0.5, u.scales.x.max!), "x", true)];
      if (on) ctx.lineTo(left, y);
      else ctx.moveTo(left, y);
      ctx.lineTo(right, y);
      on = true;
    }
    ctx.stroke();
  }
  ctx.setLineDash([]);
  // No error at all has no place on a log scale: it is a line on the floor.
  if (shown[0]) {
    const read = rows.metric(shown[0].name);
    ctx.strokeStyle = colourOf(shown[0]);
    ctx.lineWidth = 3 * ratio;
    ctx.beginPath();
    for (let k = from; k <= to; k++) {
      const value = read(places[k]);
      // Metrics look at what is finite on both sides: where all is NaN they find no error, and that is none to show.
      if (value === null || shown[0].of(value) !== 0 || rows.status(places[k]) === "fail") continue;
      const y = bbox.top + bbox.height - 1.5 * ratio;
      ctx.moveTo(u.valToPos(Math.max(k - 0.5, u.scales.x.min!), "x", true), y);
      ctx.lineTo(u.valToPos(Math.min(k + 0.5, u.scales.x.max!), "x", true), y);
    }
    ctx.stroke();
    ctx.lineWidth = 1.25 * ratio;
  }
  ctx.fillStyle = bad;
  const dot = (to - from > 2000 ? 1.6 : 3) * ratio;
  const lead = shown[0];
  for (let k = from; k <= to; k++) {
    const row = places[k];
    if (rows.status(row) !== "fail") continue;
    const x = u.valToPos(k, "x", true);
    const name = rows.decidedBy(row);
    const metric = shown.find((m) => m.name === name) ?? lead;
    const value = metric ? metric.of(rows.metric(metric.name)(row) ?? NaN) : NaN;
    const odd = !(value > 0) || !Number.isFinite(value);
    const y = odd ? bbox.top + 6 * ratio : u.valToPos(value, "y", true);
    ctx.beginPath();
    if (odd) {
      ctx.moveTo(x, y - 4 * ratio);
      ctx.lineTo(x + 4 * ratio, y + 3 * ratio);
      ctx.lineTo(x - 4 * ratio, y + 3 * ratio);
    } else ctx.arc(x, y, dot, 0, 7);
    ctx.fill();
  }
  const flag = (k: number, colour: string, text: string) => {
    if (k < u.scales.x.min! - 0.5 || k > u.scales.x.max! + 0.5) return;
    const x = Math.round(u.valToPos(k, "x", true)) + 0.5;
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.5 * ratio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top - (text ? 6 * ratio : 0));
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!text) return;
    ctx.font = `600 ${0.84 * parseFloat(getComputedStyle(document.documentElement).fontSize) * ratio}px system-ui, sans-serif`;
    const room = bbox.left + bbox.width;
    // The end of a name says more than its beginning.
    let words = text;
    for (let cut = 1; ctx.measureText(words).width > room && cut < text.length; cut++) words = `…${text.slice(cut)}`;
    const wide = ctx.measureText(words).width;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    // Right of the line, else left of it, else as far to the right as there is room.
    const after = x + 5 * ratio;
    const before = x - wide - 5 * ratio;
    const start = after + wide <= room ? after : before >= 0 ? before : room - wide;
    ctx.fillText(words, start, bbox.top - 11 * ratio);
  };
  if (choice) {
    const k = placeOf(choice.row, choice.site);
    if (k >= 0) flag(k, style("--accent"), "");
  }
  if (data.verdict.row !== null) {
    const k = placeOf(data.verdict.row, data.verdict.site ?? rows.site(data.verdict.row));
    if (k >= 0) flag(k, bad, `first divergence: ${data.verdict.site ?? rows.site(data.verdict.row)}`);
  }
  ctx.restore();
}
