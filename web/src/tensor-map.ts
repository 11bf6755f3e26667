// The map of a pair's error: wheel and pinch zoom, dragging moves or selects, keys do both.

import { dark, cividis, cividisGradient } from "./colour";
import { h } from "./dom";
import { count, fig } from "./format";
import type { Numbers } from "./packing";
import { Remote, isAbort } from "./remote";
import type { Sheet } from "./tensor";

export interface Part {
  top: number;
  bottom: number;
  left: number;
  right: number;
}

export type Shown = "max" | "mean" | "reference" | "candidate";

interface MapAnswer extends Part {
  height: number;
  width: number;
  max: Numbers;
  mean: Numbers;
  reference: Numbers;
  candidate: Numbers;
  note: string;
}

interface Listeners {
  moved(): void;
  selected(part: Part | null): void;
  pointed(row: number, column: number): void;
  told(text: string): void;
  noted(text: string): void;
  trouble(trouble: unknown): void;
}

/** What is visible, in rows and columns; not whole numbers while it moves. */
interface View {
  top: number;
  left: number;
  height: number;
  width: number;
}

/** Room for the numbers along the sides, in letters of them. */
const MARGIN = { left: 4.9, bottom: 3.1, top: 0.4, right: 0.4 };
const CELL = 3;
const ODD: [number, number, number] = [213, 94, 0];

export class TensorMap {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly bar = h("i", { class: "scale" });
  private readonly lowText = h("span");
  private readonly highText = h("span");
  private readonly oddKey = h("span", { hidden: true });
  private view: View;
  private answer: MapAnswer | null = null;
  private image: HTMLCanvasElement | null = null;
  private shown: Shown = "max";
  private mode: "move" | "select" = "move";
  private selection: Part | null = null;
  private marked: Part | null = null;
  private waiting: AbortController | null = null;
  private timer = 0;
  private painting = 0;
  private readonly pointers = new Map<number, { x: number; y: number }>();

  constructor(
    private readonly remote: Remote,
    private readonly row: number,
    private readonly sheet: Sheet,
    private readonly on: Listeners,
  ) {
    this.view = { top: 0, left: 0, height: sheet.rows, width: sheet.columns };
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": `Map of the error, ${sheet.rows} rows by ${sheet.columns} columns. Arrows move, plus and minus zoom, 0 shows everything, Enter shows the values in the middle.`,
    });
    const swatch = h("i", { class: "swatch" });
    swatch.style.background = `rgb(${ODD.join(" ")})`;
    this.oddKey.append(swatch, "not finite on one side only");
    this.element = h(
      "div",
      { class: "tensor-map" },
      this.canvas,
      h("p", { class: "key" }, h("span", null, this.lowText, this.bar, this.highText), this.oddKey),
    );
    this.listen();
    const sized = new ResizeObserver(() => {
      if (!this.canvas.isConnected) {
        sized.disconnect(); // another tensor lies open
        return;
      }
      this.ask();
      this.paint();
    });
    sized.observe(this.canvas);
  }

  /** The whole rows and columns that are visible. */
  part(): Part {
    const { view, sheet } = this;
    const top = Math.min(sheet.rows - 1, Math.max(0, Math.floor(view.top + 1e-6)));
    const left = Math.min(sheet.columns - 1, Math.max(0, Math.floor(view.left + 1e-6)));
    return {
      top,
      left,
      bottom: Math.max(top + 1, Math.min(sheet.rows, Math.ceil(view.top + view.height - 1e-6))),
      right: Math.max(left + 1, Math.min(sheet.columns, Math.ceil(view.left + view.width - 1e-6))),
    };
  }

  go(part: Part): void {
    this.set({ top: part.top, left: part.left, height: part.bottom - part.top, width: part.right - part.left });
  }

  whole(): void {
    this.set({ top: 0, left: 0, height: this.sheet.rows, width: this.sheet.columns });
  }

  /** Below 1 nearer, above 1 farther; around a place of the map, its middle unless said. */
  zoom(by: number, across = 0.5, down = 0.5): void {
    const { view } = this;
    const height = view.height * by;
    const width = view.width * by;
    this.set({ top: view.top + (view.height - height) * down, left: view.left + (view.width - width) * across, height, width });
  }

  show(what: Shown): void {
    this.shown = what;
    this.tint();
    this.paint();
  }

  dragging(mode: "move" | "select"): void {
    this.mode = mode;
    this.canvas.classList.toggle("selects", mode === "select");
  }

  unselect(): void {
    this.selection = null;
    this.paint();
    this.on.selected(null);
  }

  /** The reader's theme has changed. */
  retheme(): void {
    this.tint();
    this.paint();
  }

  /** A frame around elements that are shown elsewhere. */
  mark(part: Part | null): void {
    this.marked = part;
    this.paint();
  }

  paint(): void {
    cancelAnimationFrame(this.painting);
    this.painting = requestAnimationFrame(() => this.draw());
  }

  private set(view: View): void {
    const { sheet } = this;
    const height = Math.min(sheet.rows, Math.max(Math.min(sheet.rows, 4), view.height));
    const width = Math.min(sheet.columns, Math.max(Math.min(sheet.columns, 4), view.width));
    // What was asked for stays in the middle when it is made to fit.
    const top = Math.min(sheet.rows - height, Math.max(0, view.top + (view.height - height) / 2));
    const left = Math.min(sheet.columns - width, Math.max(0, view.left + (view.width - width) / 2));
    this.view = { top, left, height, width };
    this.paint();
    this.ask();
    this.on.moved();
  }

  private ask(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.fetch(), this.answer ? 70 : 0);
  }

  private async fetch(): Promise<void> {
    const box = this.inner();
    if (!this.canvas.isConnected || box.width < 8 || box.height < 8) return;
    this.waiting?.abort();
    const waiting = (this.waiting = new AbortController());
    const size = { height: Math.max(1, Math.round(box.height / CELL)), width: Math.max(1, Math.round(box.width / CELL)) };
    this.canvas.setAttribute("aria-busy", "true");
    try {
      const found = await this.remote.ask<MapAnswer>("map", { row: this.row, ...this.part(), ...size }, waiting.signal);
      this.answer = found;
      this.on.noted(found.note);
      this.tint();
      this.paint();
    } catch (trouble) {
      if (!isAbort(trouble)) this.on.trouble(trouble);
    }
    if (this.waiting === waiting) this.canvas.removeAttribute("aria-busy");
  }

  /** The answer as an image of one pixel a cell. */
  private tint(): void {
    const { answer } = this;
    if (!answer) return;
    const values = answer[this.shown];
    const image = document.createElement("canvas");
    image.width = answer.width;
    image.height = answer.height;
    const context = image.getContext("2d")!;
    const pixels = context.createImageData(answer.width, answer.height);
    const signed = this.shown === "reference" || this.shown === "candidate";
    let [low, high] = [Infinity, 0];
    for (const set of signed ? [answer.reference, answer.candidate] : [values])
      for (let i = 0; i < set.length; i++) {
        const size = Math.abs(set[i]);
        if (size > 0 && Number.isFinite(size)) {
          low = Math.min(low, size);
          high = Math.max(high, size);
        }
      }
    // Two to four decades: equal errors must not look like none.
    low = Math.max(Math.min(low, high * 1e-2), high * 1e-4);
    const reach = Math.log(high / low) || 1;
    let odd = false;
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      let colour: number[];
      if (signed) colour = Number.isNaN(value) ? ODD : diverging(high ? value / high : 0);
      else if (!Number.isFinite(value)) colour = ODD;
      else colour = cividis(value > 0 ? Math.log(Math.max(value, low) / low) / reach : 0);
      odd ||= colour === ODD;
      pixels.data.set([colour[0], colour[1], colour[2], 255], i * 4);
    }
    context.putImageData(pixels, 0, 0);
    this.image = image;
    this.bar.style.background = signed ? divergingGradient() : cividisGradient();
    this.lowText.textContent = high === 0 ? (signed ? "0" : "no error") : signed ? fig(-high) : `≤ ${fig(low)}`;
    this.highText.textContent = high === 0 ? "" : fig(high);
    this.oddKey.hidden = !odd;
  }

  private inner(): { left: number; top: number; width: number; height: number; letter: number } {
    const letter = parseFloat(getComputedStyle(this.canvas).fontSize) * 0.8;
    return {
      letter,
      left: MARGIN.left * letter,
      top: MARGIN.top * letter,
      width: this.canvas.clientWidth - (MARGIN.left + MARGIN.right) * letter,
      height: this.canvas.clientHeight - (MARGIN.top + MARGIN.bottom) * letter,
    };
  }

  private draw(): void {
    const { canvas, view, answer, image } = this;
    if (!canvas.isConnected) return;
    const ratio = devicePixelRatio || 1;
    const [wide, tall] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
    const context = canvas.getContext("2d")!;
    const style = getComputedStyle(canvas);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    const box = this.inner();
    const x = (column: number) => box.left + ((column - view.left) / view.width) * box.width;
    const y = (row: number) => box.top + ((row - view.top) / view.height) * box.height;
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.width, box.height);
    context.clip();
    context.fillStyle = style.getPropertyValue("--panel");
    context.fillRect(box.left, box.top, box.width, box.height);
    if (answer && image) {
      context.imageSmoothingEnabled = false;
      context.drawImage(image, x(answer.left), y(answer.top), x(answer.right) - x(answer.left), y(answer.bottom) - y(answer.top));
    }
    const frame = (part: Part, colours: string[], dash: number[]) => {
      context.setLineDash(dash);
      colours.forEach((colour, at) => {
        context.strokeStyle = colour;
        context.lineWidth = at === 0 ? 3 : 1.25;
        context.strokeRect(x(part.left), y(part.top), Math.max(2, x(part.right) - x(part.left)), Math.max(2, y(part.bottom) - y(part.top)));
      });
      context.setLineDash([]);
    };
    if (this.marked) frame(this.marked, ["rgb(0 0 0 / 55%)", "#ffffff"], []);
    if (this.selection) frame(this.selection, ["rgb(0 0 0 / 70%)", "#ff9a5c"], []);
    context.restore();
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(box.left - 0.5, box.top - 0.5, box.width + 1, box.height + 1);
    context.fillStyle = style.getPropertyValue("--quiet");
    context.font = `${box.letter}px ${style.fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of ticks(view.top, view.height, box.height / (2.4 * box.letter), this.sheet.rows))
      context.fillText(count(tick), box.left - box.letter / 2, Math.min(box.top + box.height - box.letter / 2, Math.max(box.top + box.letter / 2, (y(tick) + y(tick + 1)) / 2)));
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    for (const tick of ticks(view.left, view.width, box.width / (6 * box.letter), this.sheet.columns)) {
      const at = (x(tick) + x(tick + 1)) / 2;
      context.fillText(count(tick), Math.min(box.left + box.width - box.letter, Math.max(box.left + box.letter, at)), box.top + box.height + 1.3 * box.letter);
    }
    const { axes, shape } = this.sheet;
    const across = axes[axes.length - 1];
    const down = axes.slice(0, -1).filter((_, at) => shape[at] > 1).join(" × ") || axes[axes.length - 2] || "";
    context.fillText(across, box.left + box.width / 2, box.top + box.height + 2.7 * box.letter);
    context.translate(box.letter, box.top + box.height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(down, 0, 0);
  }

  private at(event: MouseEvent): { row: number; column: number; across: number; down: number } {
    const outer = this.canvas.getBoundingClientRect();
    const box = this.inner();
    const across = Math.min(1, Math.max(0, (event.clientX - outer.left - box.left) / box.width));
    const down = Math.min(1, Math.max(0, (event.clientY - outer.top - box.top) / box.height));
    const { view, sheet } = this;
    return {
      across,
      down,
      row: Math.min(sheet.rows - 1, Math.floor(view.top + down * view.height)),
      column: Math.min(sheet.columns - 1, Math.floor(view.left + across * view.width)),
    };
  }

  private tell(row: number, column: number): void {
    const { answer } = this;
    if (!answer || row < answer.top || row >= answer.bottom || column < answer.left || column >= answer.right) {
      this.on.told("");
      return;
    }
    const cell = (at: number, first: number, extent: number, cells: number): [number, number, number] => {
      const index = Math.min(cells - 1, Math.floor(((at - first + 1) * cells - 1) / extent));
      return [index, first + Math.floor((index * extent) / cells), first + Math.floor(((index + 1) * extent) / cells)];
    };
    const [i, top, bottom] = cell(row, answer.top, answer.bottom - answer.top, answer.height);
    const [j, left, right] = cell(column, answer.left, answer.right - answer.left, answer.width);
    const at = i * answer.width + j;
    const range = (from: number, to: number) => (to - from === 1 ? count(from) : `${count(from)}–${count(to - 1)}`);
    const one = bottom - top === 1 && right - left === 1;
    const [max, mean] = [answer.max[at], answer.mean[at]];
    const error = one ? `error ${fig(max)}` : `largest error ${fig(max)}, mean ${fig(mean)}`;
    const sides = `${one ? "" : "mean "}reference ${fig(answer.reference[at])}, candidate ${fig(answer.candidate[at])}`;
    this.on.told(`row ${range(top, bottom)}, column ${range(left, right)}: ${error}; ${sides}`);
  }

  private listen(): void {
    const { canvas, pointers } = this;
    let start: { x: number; y: number; view: View; row: number; column: number; select: boolean; moved: boolean } | null = null;
    let pinch = 0;
    const distance = () => {
      const [a, b] = [...pointers.values()];
      return Math.hypot(a.x - b.x, a.y - b.y);
    };
    canvas.addEventListener(
      "wheel",
      (event) => {
        // A wheel that only passes over the map goes on scrolling the page.
        if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
        event.preventDefault();
        const { across, down } = this.at(event);
        this.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(1, Math.abs(event.deltaY) / 240)), across, down);
      },
      { passive: false },
    );
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      if (pointers.size === 2) {
        pinch = distance();
        start = null;
        return;
      }
      const { row, column } = this.at(event);
      const select = event.shiftKey !== (this.mode === "select");
      start = { x: event.clientX, y: event.clientY, view: this.view, row, column, select, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      const { row, column } = this.at(event);
      this.tell(row, column);
      const known = pointers.get(event.pointerId);
      if (!known) return;
      [known.x, known.y] = [event.clientX, event.clientY];
      if (pointers.size === 2 && pinch) {
        const now = distance();
        this.zoom(pinch / Math.max(1, now));
        pinch = now;
        return;
      }
      if (!start) return;
      const [dx, dy] = [event.clientX - start.x, event.clientY - start.y];
      if (!start.moved && Math.hypot(dx, dy) < 4) return;
      start.moved = true;
      const box = this.inner();
      if (start.select) {
        this.selection = {
          top: Math.min(start.row, row),
          bottom: Math.max(start.row, row) + 1,
          left: Math.min(start.column, column),
          right: Math.max(start.column, column) + 1,
        };
        this.paint();
      } else {
        const { view } = start;
        this.set({ ...view, top: view.top - (dy / box.height) * view.height, left: view.left - (dx / box.width) * view.width });
      }
    });
    const end = (event: PointerEvent) => {
      pointers.delete(event.pointerId);
      if (start?.moved && start.select) this.on.selected(this.selection);
      else if (start && !start.moved && event.type === "pointerup") this.on.pointed(start.row, start.column);
      start = null;
      pinch = 0;
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointerleave", () => this.on.told(""));
    canvas.addEventListener("dblclick", (event) => {
      const { across, down } = this.at(event);
      this.zoom(0.35, across, down);
    });
    canvas.addEventListener("keydown", (event) => {
      const { view } = this;
      const moves: Record<string, () => void> = {
        ArrowUp: () => this.set({ ...view, top: view.top - view.height / 4 }),
        ArrowDown: () => this.set({ ...view, top: view.top + view.height / 4 }),
        ArrowLeft: () => this.set({ ...view, left: view.left - view.width / 4 }),
        ArrowRight: () => this.set({ ...view, left: view.left + view.width / 4 }),
        "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5),
        "-": () => this.zoom(2),
        "0": () => this.whole(),
        Escape: () => this.unselect(),
        Enter: () => this.on.pointed(Math.floor(view.top + view.height / 2), Math.floor(view.left + view.width / 2)),
      };
      const move = moves[event.key];
      if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      move();
    });
  }
}

/** Round numbers inside a range, about so many. */
function ticks(first: number, extent: number, wanted: number, most: number): number[] {
  const raw = Math.max(1, extent / Math.max(1, wanted));
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw - 1e-9) ?? raw);
  const found: number[] = [];
  for (let at = Math.max(0, Math.ceil(first / step - 1e-9)) * step; at < Math.min(most, first + extent - 1e-9); at += step) found.push(at);
  return found;
}

/** Blue below zero, orange above, the paper's colour at zero. */
function diverging(at: number): [number, number, number] {
  const middle = dark() ? [24, 30, 38] : [247, 247, 247];
  const end = at < 0 ? (dark() ? [86, 170, 240] : [11, 92, 160]) : dark() ? [245, 150, 70] : [190, 80, 10];
  const t = Math.min(1, Math.abs(at)) ** 0.6;
  return [0, 1, 2].map((c) => Math.round(middle[c] + (end[c] - middle[c]) * t)) as [number, number, number];
}

function divergingGradient(): string {
  const stops = [-1, -0.5, -0.2, 0, 0.2, 0.5, 1].map((at) => `rgb(${diverging(at).join(" ")}) ${(at + 1) * 50}%`);
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}
