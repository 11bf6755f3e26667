// Both sides' values of a few rows and columns, the reference above the candidate.

import { heat } from "./colour";
import { clear, h } from "./dom";
import { count, fig } from "./format";
import { figure, type Numbers } from "./packing";
import { Remote, isAbort, said } from "./remote";
import type { Sheet } from "./tensor";
import type { Part } from "./tensor-map";

interface ValuesAnswer {
  top: number;
  left: number;
  height: number;
  width: number;
  reference: Numbers | string[];
  candidate: Numbers | string[];
  error: Numbers;
  names: string[];
}

const TALL = 10;
/** Room for a cell and for the names of the rows, in letters of the page. */
const CELL = 6.6;
const NAMES = 10;

export class ValueTable {
  readonly element = h("section", { class: "tensor-values", "aria-label": "Values of both sides" });
  /** Whether somebody wants to see a certain place. */
  asked = false;
  private readonly body = h("div", { class: "value-grid", tabindex: 0 });
  private readonly head = h("h3", null, "Values");
  private waiting: AbortController | null = null;
  private part: Part | null = null;
  private last: [ValuesAnswer, [number, number] | null] | null = null;

  constructor(
    private readonly remote: Remote,
    private readonly row: number,
    private readonly sheet: Sheet,
    private readonly mark: (part: Part) => void,
  ) {
    const go = (rows: number, columns: number) => () => this.step(rows, columns);
    this.element.append(
      h(
        "div",
        { class: "controls" },
        this.head,
        h(
          "span",
          { class: "segmented", role: "group", "aria-label": "Move the window of values" },
          h("button", { type: "button", "aria-label": "Rows above", title: "Rows above", on: { click: go(-1, 0) } }, "↑"),
          h("button", { type: "button", "aria-label": "Rows below", title: "Rows below", on: { click: go(1, 0) } }, "↓"),
          h("button", { type: "button", "aria-label": "Columns to the left", title: "Columns to the left", on: { click: go(0, -1) } }, "←"),
          h("button", { type: "button", "aria-label": "Columns to the right", title: "Columns to the right", on: { click: go(0, 1) } }, "→"),
        ),
        h("span", { class: "remark" }, "In each cell the reference stands above the candidate; its colour is the error against the largest value around. A click on the map shows the values there."),
      ),
      this.body,
    );
    const sized = new ResizeObserver(() => {
      const { part } = this;
      if (!this.body.isConnected) sized.disconnect(); // another tensor lies open
      else if (part && Math.min(this.sheet.columns, this.fitting()) !== part.right - part.left) void this.around(part.top, part.left, true);
    });
    sized.observe(this.body);
  }

  /** Show the window around an element, or with it in the top left corner. */
  async around(row: number, column: number, corner = false): Promise<void> {
    const { sheet } = this;
    this.asked = true;
    const wide = this.fitting();
    const height = Math.min(TALL, sheet.rows);
    const width = Math.min(wide, sheet.columns);
    const top = Math.max(0, Math.min(sheet.rows - height, corner ? row : row - (height >> 1)));
    const left = Math.max(0, Math.min(sheet.columns - width, corner ? column : column - (width >> 1)));
    this.waiting?.abort();
    const waiting = (this.waiting = new AbortController());
    const part = { top, bottom: top + height, left, right: left + width };
    try {
      const found = await this.remote.ask<ValuesAnswer>("values", { row: this.row, ...part }, waiting.signal);
      this.part = part;
      this.draw(found, corner ? null : [row, column]);
      this.mark(part);
    } catch (trouble) {
      if (!isAbort(trouble)) clear(this.body, h("p", { class: "reason" }, said(trouble)));
    }
  }

  private fitting(): number {
    const letter = parseFloat(getComputedStyle(this.body).fontSize);
    return Math.max(2, Math.floor(this.body.clientWidth / letter / CELL - NAMES / CELL));
  }

  retheme(): void {
    if (this.last) this.draw(...this.last);
  }

  private step(rows: number, columns: number): void {
    const { part } = this;
    if (!part) return;
    void this.around(part.top + rows * (part.bottom - part.top), part.left + columns * (part.right - part.left), true);
  }

  private draw(found: ValuesAnswer, chosen: [number, number] | null): void {
    const { sheet } = this;
    this.last = [found, chosen];
    this.head.replaceChildren("Values", h("small", null, `rows ${count(found.top)}–${count(found.top + found.height - 1)}, columns ${count(found.left)}–${count(found.left + found.width - 1)}`));
    let scale = 0;
    for (let i = 0; i < found.reference.length; i++) {
      const size = Math.abs(number(found.reference[i]));
      if (Number.isFinite(size)) scale = Math.max(scale, size);
    }
    const head = h("tr", null, h("th", { scope: "col" }, ""));
    for (let j = 0; j < found.width; j++) head.append(h("th", { scope: "col", class: "right" }, `${j === 0 ? `${sheet.axes[sheet.axes.length - 1]} ` : ""}${count(found.left + j)}`));
    const body = h("tbody");
    for (let i = 0; i < found.height; i++) {
      const line = h("tr", null, h("th", { scope: "row", title: found.names[i] }, sheet.shape.length > 1 ? found.names[i] : ""));
      for (let j = 0; j < found.width; j++) {
        const at = i * found.width + j;
        const error = found.error[at];
        const cell = h(
          "td",
          { class: "right", title: `${found.names[i]}, column ${found.left + j}: error ${fig(error)}` },
          h("span", null, shown(found.reference[at])),
          h("span", null, shown(found.candidate[at])),
        );
        if (error !== 0) {
          // A relative error of a hundredth of the largest value nearby is where blue turns orange.
          const colours = heat(Number.isNaN(error) ? Infinity : scale > 0 ? Math.abs(error) / (scale * 0.01) : Infinity);
          cell.style.background = colours.back;
          cell.style.color = colours.ink;
        }
        if (chosen && chosen[0] === found.top + i && chosen[1] === found.left + j) cell.classList.add("chosen");
        line.append(cell);
      }
      body.append(line);
    }
    clear(this.body, h("table", { class: "plain values" }, h("thead", null, head), body));
  }
}

function number(value: number | string): number {
  return typeof value === "string" ? Number(value) : value;
}

/** Six digits, so that two sides that agree to three can be told apart; long integers are text. */
function shown(value: number | string): string {
  if (typeof value === "string") return /^[-\d]+$/.test(value) ? value.replace("-", "−") : fig(figure(value));
  if (!Number.isFinite(value) || Number.isInteger(value)) return fig(value);
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e6 ? value.toPrecision(6) : value.toExponential(4).replace("e+", "e");
  return text.replaceAll("-", "−");
}
