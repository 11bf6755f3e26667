// Pictures of one pair of tensors: histograms, the map of the error, who stands out.

import type { Pictures } from "./source";
import { h, s, clear } from "./dom";
import { cividis, cividisGradient, lineColour } from "./colour";
import { count, fig, percent, plural } from "./format";
import { figure, type Numbers } from "./packing";

const WIDE = 420;
const TALL = 150;
const LEFT = 6;
const BOTTOM = 18;

export function drawPictures(pictures: Pictures): HTMLElement {
  return h(
    "div",
    { class: "pictures" },
    pictures.histogram && valueHistogram(pictures.histogram),
    pictures.error && errorHistogram(pictures.error),
    pictures.heat && heatMap(pictures.heat),
    suspects(pictures),
    worstValues(pictures),
    pictures.note && h("p", { class: "remark wide" }, pictures.note),
  );
}

function largest(values: Numbers): number {
  let most = 0;
  for (let i = 0; i < values.length; i++) most = Math.max(most, values[i]);
  return most;
}

function total(values: Numbers): number {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i];
  return sum;
}

/** Counts as an outline of steps; logarithmic, so that a few outliers can be seen beside the bulk. */
function steps(counts: Numbers, most: number, closed: boolean): string {
  const width = (WIDE - 2 * LEFT) / counts.length;
  const high = Math.log1p(most) || 1;
  const floor = TALL - BOTTOM;
  let path = `M${LEFT} ${floor}`;
  for (let i = 0; i < counts.length; i++) {
    const y = floor - (Math.log1p(counts[i]) / high) * (floor - 8);
    path += `V${y.toFixed(1)}H${(LEFT + (i + 1) * width).toFixed(1)}`;
  }
  return path + `V${floor}${closed ? "Z" : ""}`;
}

function axis(low: string, middle: string, high: string): SVGElement[] {
  const y = TALL - 4;
  return [
    s("line", { x1: LEFT, x2: WIDE - LEFT, y1: TALL - BOTTOM, y2: TALL - BOTTOM, class: "axis" }),
    s("text", { x: LEFT, y, class: "tick" }, low),
    s("text", { x: WIDE / 2, y, class: "tick", "text-anchor": "middle" }, middle),
    s("text", { x: WIDE - LEFT, y, class: "tick", "text-anchor": "end" }, high),
  ];
}

function panel(title: string, ...inside: (Node | string | null | false)[]): HTMLElement {
  return h("figure", { class: "panel" }, h("figcaption", null, title), ...inside);
}

function svg(label: string, ...inside: Node[]): SVGElement {
  return s("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": label, class: "histogram" }, ...inside);
}

function key(...entries: [string, string][]): HTMLElement {
  return h(
    "p",
    { class: "key" },
    ...entries.map(([colour, text]) => {
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = colour;
      return h("span", null, swatch, text);
    }),
  );
}

function valueHistogram(data: NonNullable<Pictures["histogram"]>): HTMLElement {
  const most = Math.max(largest(data.reference), largest(data.candidate));
  const last = data.edges.length - 1;
  const [blue, orange] = [lineColour(0), lineColour(5)];
  const middle = data.edges[last >> 1];
  const odd = (["reference", "candidate"] as const)
    .map((side) => {
      const found = Object.entries(data.nonfinite?.[side] ?? {}).filter(([, n]) => n);
      return found.length ? `${side}: ${found.map(([what, n]) => `${count(n)} ${what === "nan" ? "NaN" : what === "inf" ? "+∞" : "−∞"}`).join(", ")}` : "";
    })
    .filter(Boolean)
    .join("; ");
  return panel(
    `Values of both sides${data.scale === "symlog" ? ", logarithmic" : ""}`,
    svg(
      `Histogram of both sides from ${fig(data.edges[0])} to ${fig(data.edges[last])}`,
      s("path", { d: steps(data.reference, most, true), fill: blue, "fill-opacity": 0.22, stroke: blue, "stroke-width": 1.2 }),
      s("path", { d: steps(data.candidate, most, false), fill: "none", stroke: orange, "stroke-width": 1.6 }),
      ...axis(fig(data.edges[0]), fig(middle), fig(data.edges[last])),
    ),
    key([blue, "reference"], [orange, "candidate"]),
    odd ? h("p", { class: "remark bad-text" }, odd) : null,
  );
}

function errorHistogram(data: NonNullable<Pictures["error"]>): HTMLElement {
  const last = data.edges.length - 1;
  const colour = lineColour(2);
  const all = total(data.counts) + data.zero;
  return panel(
    "Size of the error |c − r|, logarithmic",
    last > 0 && data.counts.length
      ? svg(
          `Histogram of the error from 1e${fig(data.edges[0])} to 1e${fig(data.edges[last])}`,
          s("path", { d: steps(data.counts, largest(data.counts), true), fill: colour, "fill-opacity": 0.25, stroke: colour, "stroke-width": 1.2 }),
          ...axis(fig(10 ** data.edges[0]), fig(10 ** data.edges[last >> 1]), fig(10 ** data.edges[last])),
        )
      : h("p", { class: "remark" }, "no element differs"),
    key([colour, "elements by |c − r|"]),
    data.zero ? h("p", { class: "remark" }, `${percent(data.zero / all)} of the elements agree exactly`) : null,
  );
}

export function paintMap(
  canvas: HTMLCanvasElement,
  height: number,
  width: number,
  values: Numbers,
): { low: number; high: number } {
  const known: number[] = [];
  for (let i = 0; i < values.length; i++) if (values[i] > 0 && Number.isFinite(values[i])) known.push(values[i]);
  known.sort((a, b) => a - b);
  const high = known[known.length - 1] ?? 0;
  // One to four decades: equal errors must not look like none, and one cell that is nearly right
  // must not take the colours from all others.
  const low = Math.max(Math.min(known[Math.floor(known.length * 0.02)] ?? 0, high * 0.1), high * 1e-4);
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(width, height);
  const span = (high > low && Math.log(high / low)) || 1;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    let colour: [number, number, number] | number[];
    if (Number.isNaN(value) || value === Infinity) colour = [213, 94, 0];
    else colour = cividis(value > 0 ? Math.log(Math.max(value, low) / low) / span : 0);
    image.data.set([colour[0], colour[1], colour[2], 255], i * 4);
  }
  context.putImageData(image, 0, 0);
  return { low, high };
}

export function scaleBar(low: string, high: string, odd: boolean): HTMLElement {
  const bar = h("i", { class: "scale" });
  bar.style.background = cividisGradient();
  const legend = h("p", { class: "key" }, h("span", null, low, bar, high));
  if (odd) {
    const swatch = h("i", { class: "swatch" });
    swatch.style.background = "rgb(213 94 0)";
    legend.append(h("span", null, swatch, "not finite"));
  }
  return legend;
}

function heatMap(data: NonNullable<Pictures["heat"]>): HTMLElement {
  const canvas = h("canvas", {
    role: "img",
    "aria-label": `Map of the error: ${plural(data.rows.extent, data.rows.called)} by ${plural(data.columns.extent, data.columns.called)}`,
  });
  const { low, high } = paintMap(canvas, data.height, data.width, data.values);
  const told = h("p", { class: "remark told" }, " ");
  const odd = Array.prototype.some.call(data.values, (v: number) => !Number.isFinite(v));
  const span = (at: number, cells: number, extent: number) => {
    const from = Math.floor((at * extent) / cells);
    const to = Math.max(from, Math.ceil(((at + 1) * extent) / cells) - 1);
    return from === to ? String(from) : `${from}–${to}`;
  };
  const look = (event: PointerEvent) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(data.width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * data.width)));
    const y = Math.min(data.height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * data.height)));
    told.textContent = `${data.rows.called} ${span(y, data.height, data.rows.extent)}, ${data.columns.called} ${span(x, data.width, data.columns.extent)}: ${fig(data.values[y * data.width + x])}`;
  };
  canvas.addEventListener("pointermove", look as EventListener as never);
  canvas.addEventListener("pointerleave", () => (told.textContent = " "));
  const element = panel(
    `Where the error is: ${data.rows.called} × ${data.columns.called}`,
    h(
      "div",
      { class: "map" },
      h("span", { class: "map-y" }, `${data.rows.called} 0 … ${count(data.rows.extent - 1)}`),
      canvas,
      h("span", { class: "map-x" }, `${data.columns.called} 0 … ${count(data.columns.extent - 1)}`),
    ),
    scaleBar(fig(low), fig(high), odd),
    h("p", { class: "remark" }, `${data.value}, logarithmic`),
    told,
  );
  element.classList.add("wide");
  return element;
}

function suspects(pictures: Pictures): HTMLElement | null {
  if (!pictures.bad.length) return null;
  return panel(
    "Who stands out",
    h(
      "div",
      { class: "suspects" },
      ...pictures.bad.map((each) => {
        const most = Math.min(8, each.index.length);
        return h(
          "div",
          null,
          h("p", null, each.sentence),
          most > 0 &&
            h(
              "table",
              { class: "plain" },
              h("thead", null, h("tr", null, h("th", null, each.axis), h("th", null, "of the squared error"), h("th", null, "relative L2"))),
              h(
                "tbody",
                null,
                ...Array.from({ length: most }, (_, i) => {
                  const bar = h("i", { class: "bar" });
                  bar.style.width = `${Math.min(100, figure(each.share[i]) * 100)}%`;
                  return h(
                    "tr",
                    null,
                    h("td", null, String(each.index[i])),
                    h("td", { class: "with-bar" }, bar, h("span", null, percent(figure(each.share[i])))),
                    h("td", { class: "right" }, fig(figure(each.value[i]))),
                  );
                }),
              ),
            ),
        );
      }),
    ),
  );
}

function worstValues(pictures: Pictures): HTMLElement | null {
  if (!pictures.values?.length) return null;
  return panel(
    "Where the error is largest",
    h(
      "table",
      { class: "plain" },
      h("thead", null, h("tr", null, h("th", null, "element"), h("th", null, "reference"), h("th", null, "candidate"))),
      h(
        "tbody",
        null,
        ...pictures.values.slice(0, 6).map((each) =>
          h("tr", null, h("td", null, each.at), h("td", { class: "right" }, fig(figure(each.reference))), h("td", { class: "right" }, fig(figure(each.candidate)))),
        ),
      ),
    ),
  );
}

export function replacePictures(into: HTMLElement, pictures: Pictures | null, why: string): void {
  clear(into, pictures ? drawPictures(pictures) : h("p", { class: "remark" }, why));
}
