// Error against depth: what every call gave, in the order in which it ran, on a log scale.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { PASSES, type Line, type Pass } from "./source";
import type { State } from "./state";
import { h, clear } from "./dom";
import { fig, metricFigure, times } from "./format";
import { lineColour, style } from "./colour";
import { inView, paintOver, paintUnder, type Drawn, type Picture } from "./depth-paint";

const ALL: Drawn[] = [
  { name: "relative_l2", label: "relative L2", of: (v) => v },
  { name: "cosine", label: "1 − cosine", of: (v) => 1 - v },
  { name: "max_abs_error", label: "max |error|", of: (v) => v },
  { name: "mean_abs_error", label: "mean |error|", of: (v) => v },
  { name: "rmse", label: "RMSE", of: (v) => v },
  { name: "max_rel_error", label: "max relative", of: (v) => v },
  { name: "mean_rel_error", label: "mean relative", of: (v) => v },
  { name: "projection", label: "|projection|", of: Math.abs },
  { name: "max_ulp", label: "max ulp", of: (v) => v },
  { name: "kl", label: "KL", of: (v) => v },
];
const FIRST_SHOWN = 3;

export class Depth {
  readonly element = h("div", { class: "depth" });
  private readonly plot = h("div", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-label": "Error along the depth of the model. Arrow keys move, Enter chooses the site, plus and minus zoom, 0 shows all.",
  });
  private readonly tip = h("div", { class: "tip", role: "status", "aria-live": "polite", hidden: true });
  private readonly legend = h("div", { class: "legend", role: "group", "aria-label": "Lines" });
  private readonly remark = h("p", { class: "remark" });
  private readonly controls = h("div", { class: "controls" });
  private chart: uPlot | null = null;
  private direction: Pass;
  private places: number[] = []; // row numbers along x
  private marks: number[] = []; // index of each place in the line of the data
  private readonly shown = new Set<string>();
  private readonly metrics: Drawn[];
  private step: number | null = null;
  private rank: number | null = null;
  private cursor = -1;

  constructor(private readonly state: State) {
    const { data, rows } = state;
    const known = new Set(rows.metrics);
    this.metrics = ALL.filter((m) => known.has(m.name));
    for (const about of data.metrics)
      if (known.has(about.name) && about.direction === "lower" && !about.unit && !this.metrics.some((m) => m.name === about.name) && about.name !== "outside_share")
        this.metrics.push({ name: about.name, label: about.name, of: (v) => v });
    const deciding = new Map<string, number>();
    for (let row = 0; row < rows.count; row++) deciding.set(rows.decidedBy(row), (deciding.get(rows.decidedBy(row)) ?? 0) + 1);
    const usual = [...this.metrics].sort((a, b) => (deciding.get(b.name) ?? 0) - (deciding.get(a.name) ?? 0));
    for (const metric of new Set([...usual.slice(0, 1), ...this.metrics])) if (this.shown.size < FIRST_SHOWN) this.shown.add(metric.name);
    const first = data.verdict.row;
    // The pass in which the drift begins; else the first there is.
    const holding = first === null ? undefined : PASSES.find((pass) => data.depth[pass]?.rows.includes(first));
    this.direction = holding ?? PASSES.find((pass) => data.depth[pass]) ?? "forward";
    if (rows.steps.length > 1) this.step = first === null ? rows.steps[0] : rows.step(first);
    if (rows.ranks.length > 1) this.rank = first === null ? rows.ranks[0] : rows.rank(first);
    this.element.append(this.controls, this.plot, this.legend, this.remark);
    this.plot.append(this.tip);
    this.drawControls();
    this.keys();
    new ResizeObserver(() => this.resize()).observe(this.plot);
    state.onChoice(() => this.chart?.redraw(false));
    this.build();
  }

  retheme(): void {
    this.build();
  }

  private line(): Line | null {
    return this.state.data.depth[this.direction];
  }

  private drawControls(): void {
    const { data, rows } = this.state;
    const several = PASSES.filter((name) => data.depth[name] !== null).length > 1;
    // The optimizer is a part of training only: of other runs nobody misses it.
    const tabs = PASSES.filter((name) => name !== "optimizer" || data.depth[name] !== null).map((name) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String(this.direction === name),
          disabled: data.depth[name] === null,
          title: data.depth[name] === null ? `the runs hold nothing of the ${named(name)}` : null,
          on: {
            click: () => {
              this.direction = name;
              this.drawControls();
              this.build();
            },
          },
        },
        name,
      ),
    );
    const pick = (label: string, values: number[], now: number | null, set: (value: number | null) => void) =>
      values.length > 1 &&
      h(
        "label",
        null,
        `${label} `,
        h(
          "select",
          {
            on: {
              change: (event: Event) => {
                const text = (event.target as HTMLSelectElement).value;
                set(text === "" ? null : Number(text));
                this.build();
              },
            },
          },
          h("option", { value: "", selected: now === null }, "all"),
          ...values.map((value) => h("option", { value, selected: value === now }, value)),
        ),
      );
    clear(
      this.controls,
      h("div", { class: several ? "segmented" : "segmented single", role: "group", "aria-label": "Part of the step" }, ...tabs),
      pick("step", rows.steps, this.step, (value) => (this.step = value)),
      pick("rank", rows.ranks, this.rank, (value) => (this.rank = value)),
      h(
        "div",
        { class: "segmented zoom", role: "group", "aria-label": "Zoom" },
        h("button", { type: "button", "aria-label": "Zoom in", on: { click: () => this.zoom(0.5) } }, "+"),
        h("button", { type: "button", "aria-label": "Zoom out", on: { click: () => this.zoom(2) } }, "−"),
        h("button", { type: "button", on: { click: () => this.zoom(Infinity) } }, "all"),
      ),
    );
  }

  private build(): void {
    const { rows } = this.state;
    const line = this.line();
    this.chart?.destroy();
    this.chart = null;
    this.places = [];
    this.marks = [];
    if (line) {
      for (let at = 0; at < line.rows.length; at++) {
        const row = line.rows[at];
        if (this.step !== null && rows.step(row) !== this.step) continue;
        if (this.rank !== null && rows.rank(row) !== this.rank) continue;
        this.places.push(row);
        this.marks.push(at);
      }
    }
    this.drawLegend();
    if (!this.places.length) {
      this.remark.textContent = `Nothing of the ${named(this.direction)} was compared here.`;
      return;
    }
    const noise = line!.noise_from ? `Shaded: normal error, from ${line!.noise_from}. ` : "";
    const meaning = this.direction === "optimizer" ? "Gradients as the optimizer sees them. " : "";
    this.remark.textContent = `${meaning}${noise}Dashed: limits. On the floor: no error at all.${this.places.some((row) => this.state.rows.decidedBy(row) === "one_sided") ? " Triangles at the top: NaN or infinite on one side, which has no size." : ""} Drag to zoom, click to choose a site.`;
    const xs = this.places.map((_, at) => at);
    const shown = this.metrics.filter((m) => this.shown.has(m.name));
    const series = shown.map((metric) => this.values(metric));
    const picture: Picture = {
      shown,
      line: line!,
      places: this.places,
      marks: this.marks,
      state: this.state,
      colourOf: (metric) => lineColour(this.metrics.indexOf(metric)),
      placeOf: (row, site) => this.placeOf(row, site),
    };
    const size = this.size();
    const em = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const font = `${(0.78 * em).toFixed(1)}px system-ui, sans-serif`;
    this.chart = new uPlot(
      {
        ...size,
        padding: [22, 14, 0, 0],
        legend: { show: false },
        cursor: {
          drag: { x: true, y: false, dist: 6 },
          points: { size: 7 },
          y: false,
          move: (chart, left, top) => {
            this.follow(chart, left);
            return [left, top];
          },
        },
        scales: {
          x: { time: false, range: (_u, low, high) => (high - low < 1 ? [low - 0.5, high + 0.5] : [low, high]) },
          y: { distr: 3, log: 10, range: (_u, low, high) => this.range(low, high) },
        },
        axes: [
          {
            stroke: style("--quiet"),
            font,
            grid: { stroke: style("--line"), width: 1 },
            ticks: { stroke: style("--line"), width: 1, size: 4 },
            size: 2.3 * em,
            splits: (u) => this.groupStarts(u),
            values: (u, splits) => splits.map((at) => this.groupName(at, u)),
          },
          {
            stroke: style("--quiet"),
            font,
            grid: { stroke: style("--line"), width: 1 },
            ticks: { stroke: style("--line"), width: 1, size: 4 },
            size: 3.6 * em,
            splits: (_u, _axis, low, high) => decades(low, high),
            values: (_u, splits) => splits.map((v) => (v === null ? "" : power(v))),
          },
        ],
        series: [
          {},
          ...shown.map((metric) => ({
            label: metric.label,
            stroke: lineColour(this.metrics.indexOf(metric)),
            width: metric === shown[0] ? 2 : 1.25,
            points: { show: this.places.length < 60, size: 4 },
            spanGaps: false,
          })),
        ],
        hooks: {
          drawClear: [(u) => paintUnder(u, picture)],
          draw: [(u) => paintOver(u, picture)],
        },
      },
      [xs, ...series] as uPlot.AlignedData,
      this.plot,
    );
    this.chart.ctx.canvas.setAttribute("aria-hidden", "true"); // the box around it speaks
    this.chart.over.addEventListener("click", () => this.pick());
    this.chart.over.addEventListener("mouseleave", () => (this.tip.hidden = true));
  }

  private values(metric: Drawn): (number | null)[] {
    const read = this.state.rows.metric(metric.name);
    return this.places.map((row) => {
      const value = read(row);
      if (value === null) return null;
      const drawn = metric.of(value);
      return drawn > 0 && Number.isFinite(drawn) ? drawn : null;
    });
  }

  private range(low: number | null, high: number | null): [number, number] {
    // Limits and noise belong to the picture even where no error comes near them.
    let [least, most] = [low ?? 1e-6, high ?? 1];
    const line = this.line();
    const { rows } = this.state;
    for (const name of this.shown) {
      const band = line?.noise[name];
      const of = this.metrics.find((m) => m.name === name)!.of;
      for (let k = 0; k < this.places.length; k++) {
        if (rows.decidedBy(this.places[k]) === name) {
          const limit = of(rows.limit(this.places[k]) ?? NaN);
          if (limit > 0 && Number.isFinite(limit)) most = Math.max(most, limit);
        }
        if (band) {
          const top = of(band.high[this.marks[k]]);
          if (top > 0 && Number.isFinite(top)) most = Math.max(most, top);
        }
      }
    }
    least = Math.max(least, most * 1e-12);
    return [10 ** Math.floor(Math.log10(least)), 10 ** Math.ceil(Math.log10(most * 1.01))];
  }

  private size(): { width: number; height: number } {
    const wide = this.plot.clientWidth || 600;
    const tall = this.plot.clientHeight || 320;
    return { width: wide, height: tall };
  }

  private resize(): void {
    const size = this.size();
    if (this.chart && (this.chart.width !== size.width || this.chart.height !== size.height)) this.chart.setSize(size);
  }

  private placeOf(row: number, site: string): number {
    const exact = this.places.indexOf(row);
    if (exact >= 0) return exact;
    return this.places.findIndex((place) => this.state.rows.site(place) === site);
  }

  // --- the axis names layers, not numbers

  private group(at: number): string {
    const site = this.state.rows.site(this.places[at]);
    const found = /^(.*?\.)?[^./]*[./]\d+(?=[./]|$)/.exec(site);
    return found ? found[0] : site.split(/[./]/)[0];
  }

  private groupStarts(u: uPlot): number[] {
    const [from, to] = inView(u, this.places.length);
    const starts: number[] = [];
    let last = "";
    for (let k = from; k <= to; k++) {
      const group = to - from < 14 ? String(k) : this.group(k);
      if (group !== last) starts.push(k);
      last = group;
    }
    // Names need room: the longest groups get theirs first, a group that has no room goes without.
    const pixels = (k: number) => u.valToPos(k, "x");
    const room = Math.min(96, Math.max(...starts.map((k) => this.groupName(k, u).length)) * 6.4 + 14);
    const lengths = starts.map((k, i) => (starts[i + 1] ?? to + 1) - k);
    const ranked = starts.map((_, i) => i).sort((a, b) => lengths[b] - lengths[a] || a - b);
    const wide = u.bbox.width / devicePixelRatio;
    // A name stands in the middle below its place, and may not leave the picture on the right.
    const fits = (k: number) => pixels(k) + this.groupName(k, u).length * 3.4 <= wide + 14;
    if (starts.length * room > 1.5 * wide) {
      const every = Math.ceil((starts.length * room) / wide);
      return starts.filter((k, i) => i % every === 0 && fits(k));
    }
    const taken: number[] = [];
    for (const i of ranked) {
      const x = pixels(starts[i]);
      if (!fits(starts[i])) continue;
      if (taken.every((other) => Math.abs(pixels(other) - x) >= room)) taken.push(starts[i]);
    }
    return taken.sort((a, b) => a - b);
  }

  private groupName(at: number, u: uPlot): string {
    const [from, to] = inView(u, this.places.length);
    const { rows } = this.state;
    const row = this.places[at] ?? this.places[0];
    // Each parameter of a module has a place of its own.
    const site = /^(param|optimizer)_/.test(rows.port(row)) ? `${rows.site(row)}.${rows.slot(row)}` : rows.site(row);
    const name = to - from < 14 ? site.split(/[./]/).slice(-2).join(".") : this.group(at);
    const short = name.length > 13 ? name.split(/[./]/).slice(-2).join(".") : name;
    return short.length > 16 ? `…${short.slice(-15)}` : short;
  }

  // --- moving about

  private follow(chart: uPlot, left: number): void {
    if (left < 0) {
      this.tip.hidden = true;
      return;
    }
    this.showTip(Math.max(0, Math.min(this.places.length - 1, Math.round(chart.posToVal(left, "x")))), left);
  }

  private showTip(at: number, left: number): void {
    if (at !== this.cursor || this.tip.hidden) {
      this.cursor = at;
      const { rows } = this.state;
      const row = this.places[at];
      const line = this.line()!;
      clear(
        this.tip,
        h("strong", null, rows.site(row)),
        h("span", null, `${rows.port(row)} · ${rows.className(row)}${rows.otherClass(row) ? ` → ${rows.otherClass(row)}` : ""}`),
        ...this.metrics
          .filter((m) => this.shown.has(m.name))
          .map((m) => {
            const value = rows.metric(m.name)(row);
            const band = line.noise[m.name];
            const high = band ? band.high[this.marks[at]] : NaN;
            const text = m.name === "cosine" && value !== null ? fig(1 - value) : metricFigure(m.name, value);
            const swatch = h("i", { class: "swatch" });
            swatch.style.background = lineColour(this.metrics.indexOf(m));
            return h(
              "span",
              null,
              swatch,
              `${m.label} ${text}`,
              rows.decidedBy(row) === m.name && ` of ${fig(m.of(rows.limit(row) ?? NaN))} allowed (${times(rows.severity(row))})`,
              !Number.isNaN(high) && `, normal up to ${fig(m.of(high))}`,
            );
          }),
      );
      this.tip.className = `tip ${rows.status(row)}`;
      this.tip.hidden = false;
    }
    const wide = this.plot.clientWidth;
    const x = left + (this.chart ? this.chart.bbox.left / devicePixelRatio : 0);
    const flips = x > wide / 2;
    this.tip.style.left = flips ? "auto" : `${x + 14}px`;
    this.tip.style.right = flips ? `${wide - x + 14}px` : "auto";
  }

  private pick(): void {
    const row = this.places[this.cursor];
    if (row !== undefined) this.state.choose(this.state.rows.site(row), row, "depth");
  }

  private zoom(factor: number): void {
    if (!this.chart) return;
    const last = this.places.length - 1;
    const { min, max } = this.chart.scales.x;
    const span = Math.min(last, Math.max(4, (max! - min!) * factor));
    const chosen = this.state.choice ? this.placeOf(this.state.choice.row, this.state.choice.site) : -1;
    const middle = factor < 1 && chosen >= min! && chosen <= max! ? chosen : (min! + max!) / 2;
    const from = Math.max(0, Math.min(last - span, middle - span / 2));
    this.chart.setScale("x", { min: from, max: from + span });
  }

  private keys(): void {
    this.plot.addEventListener("keydown", (event) => {
      const last = this.places.length - 1;
      if (!this.chart || last < 0) return;
      let at = this.cursor < 0 ? Math.round(this.chart.scales.x.min!) : this.cursor;
      const big = event.shiftKey ? 10 : 1;
      if (event.key === "ArrowRight") at = Math.min(last, at + big);
      else if (event.key === "ArrowLeft") at = Math.max(0, at - big);
      else if (event.key === "Home") at = 0;
      else if (event.key === "End") at = last;
      else if (event.key === "Enter") return this.pick();
      else if (event.key === "+" || event.key === "=") return this.zoom(0.5);
      else if (event.key === "-") return this.zoom(2);
      else if (event.key === "0") return this.zoom(Infinity);
      else if (event.key === "Escape") {
        this.tip.hidden = true;
        return;
      } else return;
      event.preventDefault();
      const left = this.chart.valToPos(at, "x");
      this.chart.setCursor({ left, top: 10 }, false);
      this.showTip(at, left);
    });
  }

  private drawLegend(): void {
    clear(
      this.legend,
      ...this.metrics.map((metric) => {
        const on = this.shown.has(metric.name);
        const swatch = h("i", { class: "swatch" });
        swatch.style.background = lineColour(this.metrics.indexOf(metric));
        const about = this.state.data.metrics.find((each) => each.name === metric.name);
        return h(
          "button",
          {
            type: "button",
            "aria-pressed": String(on),
            title: about?.meaning,
            on: {
              click: () => {
                if (on) this.shown.delete(metric.name);
                else this.shown.add(metric.name);
                this.build();
              },
            },
          },
          swatch,
          metric.label,
        );
      }),
    );
  }
}

function named(pass: Pass): string {
  return pass === "optimizer" ? pass : `${pass} pass`;
}

function decades(low: number, high: number): number[] {
  const [from, to] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  const every = Math.max(1, Math.ceil((to - from) / 9));
  return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => 10 ** (from + i * every));
}

function power(value: number): string {
  const at = Math.log10(value);
  if (Math.abs(at - Math.round(at)) > 1e-6) return "";
  if (value >= 0.001 && value <= 1000) return String(Number(value.toPrecision(3)));
  return `1e${Math.round(at)}`.replace("-", "−");
}
