// The module tree: heat of the worst tensor below, unfolded on the way to the first divergence.

import type { State } from "./state";
import { h, clear } from "./dom";
import { heat } from "./colour";
import { count, times } from "./format";
import { VirtualList } from "./virtual";
import type { Heat } from "./rows";

const HEIGHT = 26;

export class Tree {
  readonly element = h("div", { class: "tree" });
  private readonly search = h("input", {
    type: "search",
    placeholder: "Search modules",
    "aria-label": "Search modules by name or class",
    autocomplete: "off",
    spellcheck: "false",
  });
  private readonly box = h("div", {
    class: "tree-box",
    role: "tree",
    tabindex: 0,
    "aria-label": "Modules, coloured by the worst tensor below each",
  });
  private readonly told = h("span", { class: "quiet", "aria-live": "polite" });
  private readonly list: VirtualList;
  private readonly children: number[][] = [];
  private readonly heats: Heat[] = [];
  private readonly levels: number[] = [];
  private readonly open = new Set<number>();
  private readonly bySite = new Map<string, number>();
  private visible: number[] = [];
  private active = 0; // index into visible
  private found: Set<number> | null = null;

  constructor(private readonly state: State) {
    const { tree } = state.data;
    for (let at = 0; at < tree.count; at++) {
      this.children.push([]);
      const parent = tree.parent[at];
      this.levels.push(parent >= 0 ? this.levels[parent] + 1 : 0);
      if (parent >= 0) this.children[parent].push(at);
      const site = tree.site[at];
      if (site !== null) this.bySite.set(site, at);
      this.heats.push(state.rows.heatOf(site === null ? [] : state.inStep(state.rows.rowsOf(site))));
    }
    for (let at = tree.count - 1; at > 0; at--) {
      const parent = this.heats[tree.parent[at]];
      const own = this.heats[at];
      parent.severity = Math.max(parent.severity, own.severity);
      parent.failing += own.failing;
      parent.compared += own.compared;
      parent.rows += own.rows;
      parent.rank = Math.max(parent.rank, own.rank);
    }
    this.open.add(0);
    for (const child of this.children[0] ?? []) if (tree.count < 200 || this.children[0].length < 12) this.open.add(child);
    if (tree.count > 4000) this.open.clear(), this.open.add(0);
    const first = state.data.verdict.site;
    if (first !== null) this.unfoldTo(this.bySite.get(first) ?? -1);
    this.element.append(
      h(
        "div",
        { class: "controls" },
        this.search,
        h("button", { type: "button", title: "Fold everything", on: { click: () => this.fold() } }, "Fold"),
        h("button", { type: "button", title: "Unfold what holds a failing tensor", on: { click: () => this.unfoldBad() } }, "Unfold failing"),
        this.told,
      ),
      this.box,
    );
    this.list = new VirtualList(
      this.box,
      HEIGHT,
      () => this.makeRow(),
      (element, index) => this.fillRow(element, index),
    );
    this.search.addEventListener("input", () => this.seek());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") {
        event.preventDefault();
        this.box.focus();
        if (event.key === "Enter") this.take();
      }
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("click", (event) => this.click(event));
    state.onChoice((choice, by) => {
      if (choice && by !== "tree") this.show(choice.site);
      else this.list.refresh();
    });
    this.relist();
  }

  retheme(): void {
    this.list.refresh();
  }

  show(site: string): void {
    const node = this.bySite.get(site);
    if (node === undefined) return;
    this.unfoldTo(node);
    this.relist();
    this.active = Math.max(0, this.visible.indexOf(node));
    this.list.reveal(this.active);
    this.list.refresh();
  }

  private unfoldTo(node: number): void {
    const { parent } = this.state.data.tree;
    for (let at = node >= 0 ? parent[node] : -1; at >= 0; at = parent[at]) this.open.add(at);
  }

  private fold(): void {
    this.open.clear();
    this.open.add(0);
    this.search.value = "";
    this.seek();
  }

  private unfoldBad(): void {
    const { parent } = this.state.data.tree;
    let left = 2000;
    this.heats.forEach((own, at) => {
      if (own.failing && parent[at] >= 0 && left-- > 0) this.open.add(parent[at]);
    });
    this.relist();
  }

  private relist(): void {
    const now = this.visible[this.active];
    this.visible = [];
    const waiting = this.state.data.tree.count ? [0] : [];
    while (waiting.length) {
      const at = waiting.pop()!;
      if (this.found && !this.found.has(at)) continue;
      this.visible.push(at);
      if (this.open.has(at) || this.found) for (let i = this.children[at].length - 1; i >= 0; i--) waiting.push(this.children[at][i]);
    }
    this.active = Math.max(0, this.visible.indexOf(now));
    this.list.setCount(this.visible.length);
    this.mark();
  }

  private seek(): void {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { tree } = this.state.data;
    if (!words.length) {
      this.found = null;
      this.told.textContent = "";
      this.relist();
      return;
    }
    this.found = new Set();
    let hits = 0;
    for (let at = 0; at < tree.count; at++) {
      const text = `${tree.site[at] ?? tree.name[at]} ${tree.class[at]}`.toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
      hits++;
      for (let up = at; up >= 0 && !this.found.has(up); up = tree.parent[up]) this.found.add(up);
    }
    this.told.textContent = hits ? `${count(hits)} found` : `nothing is called “${this.search.value.trim()}”`;
    this.relist();
    const first = this.visible.findIndex((at) => `${tree.site[at] ?? ""} ${tree.class[at]}`.toLowerCase().includes(words[0]));
    this.active = Math.max(0, first);
    this.mark();
  }

  private makeRow(): HTMLElement {
    return h(
      "div",
      { class: "tree-row", role: "treeitem" },
      h("span", { class: "twist", "aria-hidden": "true" }),
      h("span", { class: "name" }),
      h("span", { class: "class" }),
      h("span", { class: "bads" }),
      h("span", { class: "heat" }),
    );
  }

  private fillRow(element: HTMLElement, index: number): void {
    const { tree, verdict } = this.state.data;
    const at = this.visible[index];
    const own = this.heats[at];
    const [twist, name, kind, bads, cell] = element.children as unknown as HTMLElement[];
    const parts = this.children[at].length;
    const open = (this.open.has(at) || this.found !== null) && parts > 0;
    element.id = `tree-${at}`;
    element.dataset["node"] = String(at);
    element.setAttribute("aria-level", String(this.levels[at] + 1));
    if (parts) element.setAttribute("aria-expanded", String(open));
    else element.removeAttribute("aria-expanded");
    const chosen = tree.site[at] !== null && this.state.choice?.site === tree.site[at];
    element.setAttribute("aria-selected", String(chosen));
    element.classList.toggle("chosen", chosen);
    element.classList.toggle("active", index === this.active);
    element.classList.toggle("first", verdict.site !== null && tree.site[at] === verdict.site);
    element.style.setProperty("--level", String(this.levels[at]));
    twist.textContent = parts ? (open ? "▾" : "▸") : "";
    name.textContent = at === 0 && tree.name[0] === "(root)" ? tree.class[0] || "(model)" : tree.name[at] || "(no name)";
    name.title = tree.site[at] ?? "";
    kind.textContent = at === 0 ? "" : tree.class[at];
    bads.textContent = own.failing ? count(own.failing) : "";
    bads.title = own.failing ? `${count(own.failing)} of ${count(own.compared)} tensors are outside their limit` : "";
    if (own.compared) {
      const colours = heat(own.severity);
      cell.style.background = colours.back;
      cell.style.color = colours.ink;
      cell.textContent = times(own.severity);
      cell.title = `worst tensor below: ${times(own.severity)} its limit`;
    } else {
      cell.style.background = "transparent";
      cell.style.color = "";
      cell.textContent = own.rows ? "–" : "";
      cell.title = own.rows ? "nothing of it was compared" : "";
    }
    element.setAttribute(
      "aria-label",
      `${name.textContent} ${kind.textContent}, ${own.compared ? `worst ${times(own.severity)} its limit` : "not compared"}${own.failing ? `, ${own.failing} failing` : ""}`,
    );
  }

  private mark(): void {
    this.list.refresh();
    const at = this.visible[this.active];
    if (at !== undefined) this.box.setAttribute("aria-activedescendant", `tree-${at}`);
  }

  private take(): void {
    const at = this.visible[this.active];
    if (at === undefined) return;
    const site = this.state.data.tree.site[at];
    if (site !== null) this.state.choose(site, -1, "tree");
    else this.toggle(at);
  }

  private toggle(at: number): void {
    if (this.open.has(at)) this.open.delete(at);
    else this.open.add(at);
    this.relist();
  }

  private click(event: MouseEvent): void {
    const row = (event.target as Element).closest<HTMLElement>(".tree-row");
    if (!row) return;
    const at = Number(row.dataset["node"]);
    this.active = this.visible.indexOf(at);
    const onTwist = (event.target as Element).classList.contains("twist");
    if (onTwist || this.state.data.tree.site[at] === null) this.toggle(at);
    else {
      if (this.children[at].length && !this.open.has(at)) {
        this.open.add(at);
        this.relist();
      }
      this.take();
    }
    this.mark();
  }

  private key(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const at = this.visible[this.active];
    const last = this.visible.length - 1;
    const { parent } = this.state.data.tree;
    let next = this.active;
    if (event.key === "ArrowDown") next = Math.min(last, next + 1);
    else if (event.key === "ArrowUp") next = Math.max(0, next - 1);
    else if (event.key === "PageDown") next = Math.min(last, next + 15);
    else if (event.key === "PageUp") next = Math.max(0, next - 15);
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else if (event.key === "ArrowRight") {
      if (this.children[at]?.length && !this.open.has(at)) this.toggle(at);
      else if (this.children[at]?.length) next = Math.min(last, next + 1);
    } else if (event.key === "ArrowLeft") {
      if (this.open.has(at) && this.children[at].length) this.toggle(at);
      else if (parent[at] >= 0) next = Math.max(0, this.visible.indexOf(parent[at]));
    } else if (event.key === "Enter" || event.key === " ") this.take();
    else if (event.key === "/") {
      this.search.focus();
    } else return;
    event.preventDefault();
    this.active = next;
    this.list.reveal(next);
    this.mark();
  }
}

export function treeLegend(): HTMLElement {
  const bar = h("i", { class: "scale" });
  const legend = h("p", { class: "remark scale-legend" });
  clear(legend, "inside its limit ", bar, " beyond it");
  return legend;
}
