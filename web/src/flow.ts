// The dataflow inside one module: its parts, what feeds what, error as colour. A click on a part that
// has parts of its own goes into it; the path above the picture leads back out.

import type { State } from "./state";
import { clear, h, s } from "./dom";
import { heat } from "./colour";
import { times } from "./format";
import type { Heat } from "./rows";

const WIDE = 178;
const HIGH = 46;
const SMALL = 74; // code between modules has no name of its own
const ACROSS = 22;
const DOWN = 34;
/** Room at both sides, for the words beside the part where the drift starts. */
const BESIDE = 104;
/** Parts that are drawn: more are a wallpaper. Those around the first divergence are kept. */
const MOST = 28;

interface Part {
  label: string;
  path: string;
  site: string | null;
  className: string;
  parent: number;
  children: number[];
  heat: Heat;
  /** Place in the order of execution. */
  order: number;
  /** Code between modules: no part of the tree. */
  between: boolean;
}

interface Edge {
  from: number;
  to: number;
  /** Nothing is known about who feeds it: it runs next. */
  assumed: boolean;
}

interface Drawn {
  shown: number[];
  edges: Edge[];
  inputs: Set<number>;
  outputs: Set<number>;
  before: number;
  after: number;
}

export class Flow {
  readonly element = h("div", { class: "flow" });
  private readonly parts: Part[] = [];
  private readonly byPath = new Map<string, number>();
  private readonly edges: [number, number][] = [];
  private readonly path = h("nav", { class: "flow-path", "aria-label": "Where this picture is" });
  private readonly box = h("div", { class: "flow-box", tabindex: 0, role: "region", "aria-label": "Dataflow" });
  private readonly remark = h("p", { class: "remark" });
  private scope = 0;
  /** As large as the rest of the page, whose letters grow with the window. */
  private scale = parseFloat(getComputedStyle(document.documentElement).fontSize) / 14;

  constructor(private readonly state: State) {
    this.readTree();
    this.readEdges();
    const zoom = (label: string, name: string, by: number) =>
      h("button", { type: "button", "aria-label": name, on: { click: () => this.zoom(by) } }, label);
    this.element.append(
      h(
        "div",
        { class: "controls" },
        this.path,
        h("div", { class: "segmented zoom", role: "group", "aria-label": "Size of the picture" }, zoom("+", "Larger", 1.25), zoom("−", "Smaller", 0.8)),
      ),
      this.box,
      this.remark,
    );
    this.enter(this.startScope());
    state.onChoice((choice, by) => {
      if (!choice || by === "flow") return;
      const part = this.byPath.get(choice.site);
      // The picture follows the reader, but not into a module it shows already as one part.
      if (part !== undefined && by !== "start") this.enter(this.parts[part].parent);
      else this.draw();
    });
  }

  /** Whether there is anything to draw: a model of one part has no flow. */
  get worthIt(): boolean {
    return this.parts.some((part) => part.children.length > 1);
  }

  retheme(): void {
    this.draw();
  }

  private readTree(): void {
    const { tree } = this.state.data;
    const { rows } = this.state;
    for (let at = 0; at < tree.count; at++) {
      const parent = at ? tree.parent[at] : -1;
      const above = parent > 0 ? this.parts[parent].path : "";
      const site = tree.site[at];
      const path = site ?? (parent < 0 ? "" : above ? `${above}.${tree.name[at]}` : tree.name[at]);
      const own = site === null ? [] : rows.rowsOf(site);
      const order = Math.min(Infinity, ...own.slice(0, 64).map((row) => rows.order(row) ?? Infinity));
      this.parts.push({ label: tree.name[at], path, site, className: tree.class[at], parent, children: [], heat: rows.heatOf(this.state.inStep(own)), order, between: false });
      if (parent >= 0) this.parts[parent].children.push(at);
      this.byPath.set(path, at);
    }
    for (let at = tree.count - 1; at > 0; at--) {
      const own = this.parts[at];
      const above = this.parts[own.parent];
      above.heat.severity = Math.max(above.heat.severity, own.heat.severity);
      above.heat.failing += own.heat.failing;
      above.heat.compared += own.heat.compared;
      above.order = Math.min(above.order, own.order);
    }
  }

  private readEdges(): void {
    const { flow } = this.state.data;
    if (!flow) return;
    const places = flow.sites.map((site) => this.place(site));
    for (let i = 0; i < flow.from.length; i++) {
      const [from, to] = [places[flow.from[i]], places[flow.to[i]]];
      if (from >= 0 && to >= 0 && from !== to) this.edges.push([from, to]);
    }
    // Code between modules runs after what feeds it and before what it feeds.
    for (const [from, to] of this.edges) {
      const [maker, reader] = [this.parts[from], this.parts[to]];
      if (reader.between) reader.order = Number.isFinite(reader.order) ? Math.max(reader.order, maker.order + 0.5) : maker.order + 0.5;
      if (maker.between && !Number.isFinite(maker.order)) maker.order = reader.order - 0.5;
    }
  }

  /** The part of a site; code between modules becomes a part of the module around it. */
  private place(site: string): number {
    const known = this.byPath.get(site);
    if (known !== undefined) return known;
    const pieces = site.split(/[./]/);
    for (let length = pieces.length - 1; length >= 0; length--) {
      const above = this.byPath.get(pieces.slice(0, length).join("."));
      if (above === undefined) continue;
      const part: Part = {
        label: pieces.slice(length).join("."),
        path: site,
        site: null,
        className: "",
        parent: above,
        children: [],
        heat: { severity: 0, failing: 0, compared: 0, rows: 0, rank: -1 },
        order: Infinity,
        between: true,
      };
      this.parts.push(part);
      this.parts[above].children.push(this.parts.length - 1);
      this.byPath.set(site, this.parts.length - 1);
      return this.parts.length - 1;
    }
    return -1;
  }

  private startScope(): number {
    const { verdict, diagnosis } = this.state.data;
    const site = verdict.site ?? diagnosis?.first_site ?? null;
    const part = site === null ? undefined : this.byPath.get(site);
    if (part === undefined) return 0;
    // A module that is to blame as a whole is looked into; a leaf is looked at among its neighbours.
    return this.parts[part].children.length > 1 ? part : Math.max(0, this.parts[part].parent);
  }

  private enter(scope: number): void {
    // A module with one part is a wrapper: go on to where there is something to see.
    while (scope > 0 && this.members(scope).length < 2) scope = this.parts[scope].parent;
    this.scope = Math.max(0, scope);
    this.draw();
  }

  private zoom(by: number): void {
    this.scale = Math.max(0.4, Math.min(3, this.scale * by));
    this.draw();
  }

  /** Parts of a module; a plain list of numbered layers is no part, its layers are. */
  private members(scope: number): number[] {
    const members: number[] = [];
    for (const child of this.parts[scope].children) {
      const { children, heat: own } = this.parts[child];
      const list = children.length > 0 && children.every((inner) => /^\d+$/.test(this.parts[inner].label) || this.parts[inner].between);
      const itself = this.parts[child].site !== null && this.state.rows.rowsOf(this.parts[child].site ?? "").length > 0;
      if (list && !itself && own.compared >= 0) members.push(...children);
      else members.push(child);
    }
    return members.sort((a, b) => this.parts[a].order - this.parts[b].order);
  }

  /** The drawn part that a part lies in; -1 if it lies outside of the picture. */
  private drawnPart(part: number, shown: Set<number>): number {
    for (let at = part; at >= 0; at = this.parts[at].parent) if (shown.has(at)) return at;
    return -1;
  }

  private picture(): Drawn {
    const every = this.members(this.scope);
    const site = this.state.choice?.site ?? this.state.data.verdict.site ?? "";
    const focus = Math.max(
      0,
      every.findIndex((at) => site === this.parts[at].path || site.startsWith(`${this.parts[at].path}.`)),
    );
    const begin = Math.max(0, Math.min(focus - MOST / 2, every.length - MOST));
    const shown = every.slice(begin, begin + MOST);
    const inside = new Set(shown);
    const drawn: Drawn = { shown, edges: [], inputs: new Set(), outputs: new Set(), before: begin, after: every.length - begin - shown.length };
    const known = new Set<string>();
    for (const [from, to] of this.edges) {
      const [maker, reader] = [this.drawnPart(from, inside), this.drawnPart(to, inside)];
      if (maker < 0 && reader >= 0) drawn.inputs.add(reader);
      else if (maker >= 0 && reader < 0) drawn.outputs.add(maker);
      else if (maker >= 0 && maker !== reader && !known.has(`${maker} ${reader}`) && this.parts[maker].order < this.parts[reader].order) {
        known.add(`${maker} ${reader}`);
        drawn.edges.push({ from: maker, to: reader, assumed: false });
      }
    }
    const fed = new Set(drawn.edges.map((edge) => edge.to));
    shown.forEach((at, index) => {
      if (index && !fed.has(at) && !drawn.inputs.has(at)) drawn.edges.push({ from: shown[index - 1], to: at, assumed: true });
    });
    return drawn;
  }

  private draw(): void {
    this.drawPath();
    const drawn = this.picture();
    const { shown, edges } = drawn;
    const level = new Map<number, number>();
    for (const at of shown) {
      const above = edges.filter((edge) => edge.to === at).map((edge) => (level.get(edge.from) ?? -1) + 1);
      level.set(at, Math.max(0, ...above));
    }
    const levels: number[][] = [];
    for (const at of shown) (levels[level.get(at)!] ??= []).push(at);
    const size = (at: number) => (this.parts[at].between ? SMALL : WIDE);
    const spans = levels.map((some) => some.reduce((sum, at) => sum + size(at) + ACROSS, -ACROSS));
    const width = Math.max(WIDE, ...spans) + 2 * BESIDE;
    const height = levels.length * (HIGH + DOWN) + DOWN;
    const middle = new Map<number, [number, number]>();
    levels.forEach((some, row) => {
      // A part stands under what feeds it, so that lines need not cross others.
      const wanted = some.map((at) => {
        const makers = edges.filter((edge) => edge.to === at && middle.has(edge.from)).map((edge) => middle.get(edge.from)![0]);
        return makers.length ? makers.reduce((sum, x) => sum + x, 0) / makers.length : null;
      });
      const sorted = some.map((at, index) => ({ at, x: wanted[index] })).sort((a, b) => (a.x ?? Infinity) - (b.x ?? Infinity));
      let least = BESIDE;
      let rest = spans[row];
      let plain = (width - spans[row]) / 2;
      for (const { at, x } of sorted) {
        const most = width - BESIDE - rest;
        const left = Math.max(least, Math.min(most, x === null ? plain : x - size(at) / 2));
        middle.set(at, [left + size(at) / 2, DOWN + row * (HIGH + DOWN) + HIGH / 2]);
        least = left + size(at) + ACROSS;
        rest -= size(at) + ACROSS;
        plain = least;
      }
    });
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${height}`,
      width: Math.round(width * this.scale),
      height: Math.round(height * this.scale),
      role: "group",
      "aria-label": `Dataflow inside ${this.parts[this.scope].path || "the model"}: ${shown.length} parts`,
    });
    svg.append(s("defs", null, arrow("flow-arrow", "flow-tip"), arrow("flow-arrow-bad", "flow-tip bad")));
    for (const edge of edges) svg.append(this.line(edge, middle));
    for (const at of drawn.inputs) svg.append(stub(middle.get(at)!, -1, this.parts[at].between));
    for (const at of drawn.outputs) svg.append(stub(middle.get(at)!, 1, this.parts[at].between));
    for (const at of shown) svg.append(this.node(at, middle.get(at)!));
    clear(this.box, svg);
    // A long chain scrolls: what it is about stands in the middle, with the words beside it.
    const focus = shown.find((at) => this.blamed(at)) ?? shown[0];
    const [x, y] = (focus === undefined ? undefined : middle.get(focus)) ?? [0, 0];
    this.box.scrollTop = y * this.scale - this.box.clientHeight / 2;
    this.box.scrollLeft = (x + BESIDE / 2) * this.scale - this.box.clientWidth / 2;
    const left = [drawn.before && `${drawn.before} parts before these`, drawn.after && `${drawn.after} after`].filter(Boolean).join(", ");
    const source = this.state.data.flow ? "An arrow is a tensor that both ends have, by its bytes or as the graph says" : "The runs do not say what feeds what";
    const { step } = this.state;
    this.remark.textContent = `${source}; a dashed one only means that it runs next. Colour: the worst tensor inside${step === null ? "" : ` in step ${step}`}, as a multiple of its limit.${left ? ` Not drawn: ${left}.` : ""}`;
  }

  private drawPath(): void {
    const way: number[] = [];
    for (let at = this.scope; at >= 0; at = this.parts[at].parent) way.unshift(at);
    clear(
      this.path,
      ...way.flatMap((at, index) => {
        const name = index ? this.parts[at].label : this.parts[at].className || "model";
        const last = index === way.length - 1;
        const step = last ? h("b", { "aria-current": "true" }, name) : h("button", { type: "button", on: { click: () => this.enter(at) } }, name);
        return index ? [h("span", { "aria-hidden": "true" }, "›"), step] : [step];
      }),
    );
  }

  private line(edge: Edge, middle: Map<number, [number, number]>): SVGElement {
    const [x1, y1] = middle.get(edge.from)!;
    const [x2, y2] = middle.get(edge.to)!;
    const half = (at: number) => (this.parts[at].between ? HIGH * 0.3 : HIGH / 2);
    const [top, bottom] = [y1 + half(edge.from), y2 - half(edge.to) - 4];
    const bend = Math.max(DOWN / 2, (bottom - top) / 2);
    const bad = this.parts[edge.from].heat.failing > 0;
    return s("path", {
      class: `flow-edge${edge.assumed ? " assumed" : ""}${bad ? " bad" : ""}`,
      d: `M${x1} ${top} C${x1} ${top + bend} ${x2} ${bottom - bend} ${x2} ${bottom}`,
      "marker-end": `url(#flow-arrow${bad ? "-bad" : ""})`,
    });
  }

  /** Whether the drift starts at a part, or in a module that it stands for. */
  private blamed(at: number): boolean {
    const { path, children } = this.parts[at];
    const first = this.state.data.verdict.site;
    return first !== null && (first === path || (children.length > 1 && first.startsWith(`${path}.`)));
  }

  private node(at: number, [x, y]: [number, number]): SVGElement {
    const part = this.parts[at];
    const container = part.children.length > 1;
    const first = this.state.data.verdict.site;
    const blamed = this.blamed(at);
    const chosen = this.state.choice?.site === part.path;
    const width = part.between ? SMALL : WIDE;
    const high = part.between ? HIGH * 0.6 : HIGH;
    const colour = part.heat.compared ? heat(part.heat.severity) : null;
    const list = /^\d+$/.test(part.label) && part.parent >= 0 && part.parent !== this.scope;
    const label = part.between ? "code" : list ? `${this.parts[part.parent].label}.${part.label}` : part.label || "model";
    const said = part.heat.compared ? times(part.heat.severity) : "";
    const open = () => {
      if (container) this.enter(at);
      else if (part.site !== null && this.state.rows.hasSite(part.site)) {
        this.state.choose(part.site, -1, "flow");
        this.draw();
      }
    };
    const can = container || (part.site !== null && this.state.rows.hasSite(part.site));
    const about = `${label}${part.className ? ` (${part.className})` : ""}${said ? `, ${said} of its limit` : ", not compared"}${blamed ? ", the drift starts here" : ""}`;
    // Colours are set as properties: the page forbids style attributes.
    const painted = <T extends SVGElement>(element: T, fill: string | undefined): T => {
      if (fill) element.style.fill = fill;
      return element;
    };
    return s(
      "g",
      {
        class: `flow-node${part.between ? " between" : ""}${blamed ? " first" : ""}${chosen ? " chosen" : ""}${can ? " can" : ""}`,
        role: can ? "button" : "img",
        tabindex: can ? 0 : null,
        "aria-label": container ? `${about}; go into it` : about,
        on: {
          click: open,
          keydown: (event: KeyboardEvent) => {
            if (event.key !== "Enter" && event.key !== " ") return;
            event.preventDefault();
            open();
          },
        },
      },
      s("title", null, part.between ? `code of ${this.parts[part.parent].path || "the model"} between its modules` : about),
      painted(s("rect", { x: x - width / 2, y: y - high / 2, width, height: high, rx: 6 }), colour?.back),
      painted(s("text", { x, y: part.between ? y + 4 : y - 3, class: "flow-name" }, cut(label, part.between ? 9 : 22)), colour?.ink),
      part.between ? null : painted(s("text", { x, y: y + 14, class: "flow-about" }, cut(`${container ? "▸ " : ""}${part.className}${said ? ` · ${said}` : ""}`, 28)), colour?.ink),
      blamed ? s("text", { x: x + width / 2 + 7, y: y + 4, class: "flow-mark" }, container && first !== part.path ? "◀ in here" : "◀ starts here") : null,
    );
  }
}

function arrow(id: string, className: string): SVGElement {
  return s("marker", { id, viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { d: "M0 0 L8 4 L0 8 z", class: className }));
}

/** An arrow from outside of the picture, or out of it. */
function stub([x, y]: [number, number], side: -1 | 1, small: boolean): SVGElement {
  const half = small ? HIGH * 0.3 : HIGH / 2;
  const from = side < 0 ? y - HIGH / 2 - DOWN + 8 : y + half;
  const to = side < 0 ? y - half - 4 : y + HIGH / 2 + DOWN - 12;
  const shift = (side * (small ? SMALL : WIDE)) / 4;
  return s("path", { class: "flow-edge", d: `M${x + shift} ${from} L${x + shift} ${to}`, "marker-end": "url(#flow-arrow)" });
}

function cut(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, most / 2 - 1)}…${text.slice(1 - most / 2)}`;
}
