// One pair of tensors, looked into: a map of the error at any zoom, figures and histograms of what is
// visible or selected, and both sides' values.

import "./tensor.css";
import type { Pictures, TensorPanel } from "./source";
import type { Rows } from "./rows";
import { clear, dotted, h } from "./dom";
import { cosine, count, fig, percent } from "./format";
import { figure } from "./packing";
import { drawPictures } from "./pictures";
import { Remote, isAbort, said } from "./remote";
import { TensorMap, type Part, type Shown } from "./tensor-map";
import { ValueTable } from "./tensor-values";

export interface Sheet {
  rows: number;
  columns: number;
  shape: number[];
  axes: string[];
  stride: number;
  complex: boolean;
  reference: string;
  candidate: string;
}

interface SideFigures {
  [name: string]: number | string;
}

interface RegionAnswer {
  statistics: {
    elements: number;
    seen: number;
    reference: SideFigures;
    candidate: SideFigures;
    error: SideFigures;
    different: number;
    one_sided: number;
  };
  histogram: NonNullable<Pictures["histogram"]>;
  error: NonNullable<Pictures["error"]>;
  note: string;
}

const SHOWN: [Shown, string, string][] = [
  ["max", "largest error", "greatest |candidate − reference| of each cell"],
  ["mean", "mean error", "mean |candidate − reference| of each cell"],
  ["reference", "reference", "mean of the reference's values in each cell"],
  ["candidate", "candidate", "mean of the candidate's values in each cell"],
];
const SCALES: [string, string][] = [
  ["auto", "auto"],
  ["even", "even"],
  ["symlog", "logarithmic"],
];

export class Tensors implements TensorPanel {
  private readonly block = h("section", { id: "tensor", class: "block tensor-block", "aria-labelledby": "tensor-title" });
  private row = -1;
  private sheet: Sheet | null = null;
  private map: TensorMap | null = null;
  private values: ValueTable | null = null;
  private selection: Part | null = null;
  private scale = "auto";
  private waiting: AbortController | null = null;
  private timer = 0;
  private readonly figures = h("div", { class: "tensor-figures", "aria-live": "polite" });

  constructor(
    private readonly remote: Remote,
    private readonly rows: Rows,
  ) {}

  show(row: number, into: HTMLElement): void {
    if (!this.block.isConnected) {
      document.querySelector(".split")?.after(this.block);
      const next = document.querySelector('.bar a[href="#runs"]');
      next?.before(h("a", { href: "#tensor", on: { click: (event: Event) => this.jump(event) } }, "Tensor"));
    }
    if (this.remote.hasValues(row)) clear(into, h("p", { class: "remark" }, h("a", { href: "#tensor", on: { click: (event: Event) => this.jump(event) } }, "Look into this tensor"), ": map at any zoom, figures and values."));
    if (row === this.row) {
      this.map?.retheme();
      this.values?.retheme();
      if (this.sheet) void this.measure();
      return;
    }
    this.row = row;
    void this.open(row);
  }

  private jump(event: Event): void {
    event.preventDefault(); // the fragment names the site
    this.block.scrollIntoView({ block: "start" });
  }

  private async open(row: number): Promise<void> {
    this.sheet = this.map = this.values = this.selection = null;
    this.waiting?.abort();
    const title = this.title(row);
    if (!this.remote.hasValues(row)) {
      const basis = this.rows.text("basis")(row);
      const why = this.rows.compared(row) ? `the values were not kept; it was measured from its ${basis}` : this.rows.reason(row) || this.rows.status(row);
      clear(this.block, title, h("p", { class: "remark", role: "status" }, `There are no values of both sides to look at: ${why}.`));
      return;
    }
    try {
      const sheet = await this.remote.ask<Sheet>("sheet", { row });
      if (row !== this.row) return;
      this.sheet = sheet;
      this.build(title, sheet);
    } catch (trouble) {
      if (row === this.row) clear(this.block, title, this.trouble(trouble));
    }
  }

  private trouble(trouble: unknown): HTMLElement {
    return h("p", { class: "reason", role: "status" }, said(trouble));
  }

  private title(row: number): HTMLElement {
    return h("h2", { id: "tensor-title" }, "Inside the tensor", h("small", null, dotted(this.rows.site(row)), ` ${this.rows.port(row)} ${this.rows.slot(row)}`));
  }

  private build(title: HTMLElement, sheet: Sheet): void {
    const types = sheet.reference === sheet.candidate ? sheet.reference : `${sheet.reference} against ${sheet.candidate}`;
    const rows = sheet.axes.slice(0, -1).filter((_, at) => sheet.shape[at] > 1);
    const about = `${sheet.shape.join(" × ")} ${types}; ${count(sheet.rows)} rows${rows.length ? ` (${rows.join(" × ")})` : ""}, ${count(sheet.columns)} columns (${sheet.axes[sheet.axes.length - 1]}${sheet.complex ? ", real and imaginary" : ""})${sheet.stride > 1 ? `; every ${sheet.stride}th element was kept` : ""}`;
    if (!sheet.rows || !sheet.columns) {
      clear(this.block, title, h("p", { class: "remark" }, about, ": the tensor is empty"));
      return;
    }
    const told = h("p", { class: "remark told", "aria-live": "off" }, " ");
    const note = h("p", { class: "remark" });
    const map = new TensorMap(this.remote, this.row, sheet, {
      moved: () => this.later(),
      selected: (part) => this.select(part),
      pointed: (row, column) => void this.values?.around(row, column),
      told: (text) => (told.textContent = text || " "),
      noted: (text) => (note.textContent = text),
      trouble: (trouble) => clear(note, this.trouble(trouble)),
    });
    this.map = map;
    this.values = new ValueTable(this.remote, this.row, sheet, (part) => map.mark(part));
    clear(
      this.block,
      title,
      h("p", { class: "remark" }, about),
      h(
        "div",
        { class: "controls tensor-controls" },
        this.chooser("What the map shows", SHOWN, "max", (chosen) => map.show(chosen as Shown)),
        this.chooser(
          "What dragging does",
          [
            ["move", "move", "dragging moves the map"],
            ["select", "select", "dragging selects a part; so does dragging with Shift"],
          ],
          "move",
          (chosen) => map.dragging(chosen as "move" | "select"),
        ),
        h(
          "span",
          { class: "segmented zoom", role: "group", "aria-label": "Zoom" },
          h("button", { type: "button", title: "Zoom out (−)", "aria-label": "Zoom out", on: { click: () => map.zoom(2) } }, "−"),
          h("button", { type: "button", title: "Zoom in (+)", "aria-label": "Zoom in", on: { click: () => map.zoom(0.5) } }, "+"),
          h("button", { type: "button", title: "The whole tensor (0)", on: { click: () => map.whole() } }, "whole"),
        ),
        ...this.slices(sheet, map),
      ),
      h(
        "div",
        { class: "tensor-split" },
        h(
          "div",
          { class: "tensor-map-side" },
          map.element,
          told,
          h("p", { class: "remark" }, "Drag to move, Shift and drag to select. Ctrl and the wheel zoom; once the map was clicked, the wheel alone."),
          note,
        ),
        this.figures,
      ),
      this.values.element,
    );
    clear(this.figures);
    map.whole();
    void this.worst(this.row, this.values);
  }

  /** Begin where the error is largest. */
  private async worst(row: number, values: ValueTable): Promise<void> {
    const found = await this.remote.ask<{ row: number; column: number }>("worst", { row }).catch(() => ({ row: 0, column: 0 }));
    if (this.values === values && !values.asked) void values.around(found.row, found.column);
  }

  private chooser(label: string, options: readonly (readonly string[])[], chosen: string, choose: (name: string) => void): HTMLElement {
    const group = h("span", { class: "segmented", role: "group", "aria-label": label });
    for (const [name, text, about] of options) {
      group.append(
        h(
          "button",
          {
            type: "button",
            title: about ?? null,
            "data-name": name,
            "aria-pressed": String(name === chosen),
            on: {
              click: (event: Event) => {
                for (const other of group.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
                choose(name);
              },
            },
          },
          text,
        ),
      );
    }
    return group;
  }

  /** Numbers to type: an index of each leading axis, or rows and columns from and to. */
  private slices(sheet: Sheet, map: TensorMap): HTMLElement[] {
    const fields: HTMLElement[] = [];
    const leading = sheet.shape.slice(0, -2);
    const inputs: (HTMLInputElement | null)[] = leading.map((size, at) => {
      if (size < 2) return null;
      const field = h("input", { type: "number", min: 0, max: size - 1, step: 1, placeholder: "all", "aria-label": `${sheet.axes[at]} of ${size}` });
      fields.push(h("label", { class: "slice" }, sheet.axes[at], field));
      return field;
    });
    const go = () => {
      // A slice is a run of rows only if every axis before it is fixed, too.
      let last = -1;
      inputs.forEach((field, at) => {
        if (field && field.value !== "") last = at;
      });
      let [first, size] = [0, sheet.rows];
      for (let at = 0; at <= last; at++) {
        size = Math.floor(size / Math.max(1, sheet.shape[at]));
        const field = inputs[at];
        let index = field ? Math.min(sheet.shape[at] - 1, Math.max(0, Math.floor(Number(field.value) || 0))) : 0;
        if (field) field.value = String(index);
        first += index * size;
      }
      map.go({ top: first, bottom: first + size, left: 0, right: sheet.columns });
    };
    for (const field of inputs) field?.addEventListener("change", go);
    const ranges = (name: string, most: number, take: (from: number, to: number) => void) => {
      const field = h("input", { type: "text", inputmode: "numeric", size: 9, placeholder: `0–${most - 1}`, "aria-label": `${name} from and to, such as 0–${most - 1}` });
      field.addEventListener("change", () => {
        const numbers = field.value.match(/\d+/g)?.map(Number) ?? [];
        if (!numbers.length) return;
        const from = Math.min(most - 1, numbers[0]);
        const to = Math.max(from, Math.min(most - 1, numbers[1] ?? numbers[0]));
        take(from, to + 1);
      });
      return h("label", { class: "slice" }, name, field);
    };
    fields.push(
      ranges("rows", sheet.rows, (top, bottom) => map.go({ ...map.part(), top, bottom })),
      ranges("columns", sheet.columns, (left, right) => map.go({ ...map.part(), left, right })),
    );
    return fields;
  }

  private select(part: Part | null): void {
    this.selection = part;
    this.later(0);
    if (part) void this.values?.around(part.top, part.left, true);
  }

  private later(delay = 160): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.measure(), delay);
  }

  private async measure(): Promise<void> {
    const { map, sheet, row } = this;
    if (!map || !sheet) return;
    const part = this.selection ?? map.part();
    this.waiting?.abort();
    const waiting = (this.waiting = new AbortController());
    this.figures.setAttribute("aria-busy", "true");
    try {
      const found = await this.remote.ask<RegionAnswer>("region", { row, ...part, scale: this.scale, bins: bins(part) }, waiting.signal);
      if (row === this.row) this.draw(found, part, sheet);
    } catch (trouble) {
      if (!isAbort(trouble) && row === this.row) clear(this.figures, this.trouble(trouble));
    }
    if (this.waiting === waiting) this.figures.removeAttribute("aria-busy");
  }

  private draw(found: RegionAnswer, part: Part, sheet: Sheet): void {
    const { statistics } = found;
    const whole = part.top === 0 && part.left === 0 && part.bottom === sheet.rows && part.right === sheet.columns;
    const where = `rows ${span(part.top, part.bottom)}, columns ${span(part.left, part.right)}`;
    const what = this.selection ? "The selection" : whole ? "The whole tensor" : "What is visible";
    const [ours, theirs] = [statistics.reference, statistics.candidate];
    const line = (name: string, key: string) =>
      h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "right" }, fig(figure(ours[key]))), h("td", { class: "right" }, fig(figure(theirs[key]))));
    const odd = ["nan", "inf", "-inf"].filter((key) => ours[key] || theirs[key]);
    const errors: [string, string][] = [
      ["largest |c − r|", fig(figure(statistics.error["max_abs_error"]))],
      ["mean |c − r|", fig(figure(statistics.error["mean_abs_error"]))],
      ["relative L2", fig(figure(statistics.error["relative_l2"]))],
      ["cosine", cosine(figure(statistics.error["cosine"]))],
      ["elements that differ", `${count(statistics.different)} (${percent(statistics.different / Math.max(1, statistics.seen))})`],
      ...(statistics.one_sided ? [["not finite on one side only", count(statistics.one_sided)] as [string, string]] : []),
    ];
    clear(
      this.figures,
      h(
        "h3",
        null,
        what,
        h("small", null, whole && !this.selection ? `${count(statistics.elements)} elements` : `${where}, ${count(statistics.elements)} elements`),
        this.selection && h("button", { type: "button", class: "small", on: { click: () => this.map?.unselect() } }, "clear the selection"),
      ),
      h(
        "div",
        { class: "metric-tables" },
        h(
          "table",
          { class: "plain figures" },
          h("thead", null, h("tr", null, h("th", null, ""), h("th", { class: "right" }, "reference"), h("th", { class: "right" }, "candidate"))),
          h("tbody", null, line("mean", "mean"), line("std", "std"), line("min", "min"), line("max", "max"), ...odd.map((key) => line(key === "nan" ? "NaN" : key === "inf" ? "+∞" : "−∞", key))),
        ),
        h(
          "table",
          { class: "plain figures" },
          h("thead", null, h("tr", null, h("th", null, "error"), h("th", null, ""))),
          h("tbody", null, ...errors.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "right" }, value)))),
        ),
      ),
      h("p", { class: "histogram-scale remark" }, "bins ", this.chooser("Bins of the values' histogram", SCALES, this.scale, (name) => {
        this.scale = name;
        void this.measure();
      })),
      drawPictures({ row: this.row, histogram: found.histogram, error: found.error, heat: null, bad: [], values: [], note: found.note }),
    );
  }
}

/** Few elements fill few bins. */
function bins(part: Part): number {
  return Math.max(8, Math.min(64, Math.round(Math.sqrt((part.bottom - part.top) * (part.right - part.left)) * 2)));
}

export function span(from: number, to: number): string {
  return to - from === 1 ? count(from) : `${count(from)}–${count(to - 1)}`;
}
