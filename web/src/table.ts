// Every row of the comparison: sorted, filtered, searched, and only the rows in view exist.

import type { State } from "./state";
import { h, clear } from "./dom";
import { count } from "./format";
import { heat } from "./colour";
import { VirtualList } from "./virtual";
import { columnViews, csvOf, type ColumnView } from "./columns";

const HEIGHT = 28;
const HEAD = 32;

export class RowTable {
  readonly element = h("div", { class: "rows" });
  private readonly grid = h("div", {
    class: "grid",
    role: "grid",
    tabindex: 0,
    "aria-label": "All tensors. Arrow keys move, Enter shows a tensor's site.",
  });
  private readonly headRow = h("div", { class: "grid-row grid-head", role: "row", "aria-rowindex": 1 });
  private readonly search = h("input", {
    type: "search",
    placeholder: "Search: names, classes, relative_l2>0.01",
    "aria-label": "Search rows: words, or a metric with a limit such as relative_l2>0.01",
    autocomplete: "off",
    spellcheck: "false",
  });
  private readonly told = h("span", { class: "quiet told", "aria-live": "polite" });
  private readonly chips = h("div", { class: "segmented chips", role: "group", "aria-label": "Status" });
  private readonly list: VirtualList;
  private readonly columns: ColumnView[];
  private shownColumns: ColumnView[] = [];
  private readonly extra = new Set<string>();
  private indexes: Int32Array;
  private status = "";
  private port = "";
  private sortBy = "order";
  private descending = false;
  private active = -1;
  private timer = 0;
  /** What is wrong with the search itself. */
  private complaint = "";

  constructor(private readonly state: State) {
    const { rows, data } = state;
    this.indexes = Int32Array.from({ length: rows.count }, (_, i) => i);
    this.columns = columnViews(state);
    if (innerWidth < 700) {
      // A narrow screen shows two or three columns: how bad it is comes right after the status.
      const at = this.columns.findIndex((c) => c.id === "severity");
      this.columns.splice(1, 0, ...this.columns.splice(at, 1));
    }
    this.shownColumns = this.columns.filter((c) => c.usual && (!c.needed || c.needed()));
    this.element.append(this.controls(), this.grid);
    this.grid.append(this.headRow);
    this.drawHead();
    this.list = new VirtualList(
      this.grid,
      HEIGHT,
      () => h("div", { class: "grid-row", role: "row" }),
      (element, index) => this.fill(element, index),
      HEAD,
    );
    this.grid.setAttribute("aria-colcount", String(this.shownColumns.length));
    this.grid.addEventListener("click", (event) => {
      const hit = (event.target as Element).closest<HTMLElement>("[data-index]");
      if (!hit) return;
      this.active = Number(hit.dataset["index"]);
      this.take();
    });
    this.grid.addEventListener("keydown", (event) => this.key(event));
    state.onChoice((choice, by) => {
      if (choice && by !== "rows" && by !== "start") {
        const at = this.indexes.indexOf(choice.row);
        if (at >= 0) {
          this.active = at;
          this.list.reveal(at);
        }
      }
      this.list.refresh();
    });
    this.apply();
    if (data.verdict.row !== null) {
      const first = data.verdict.row;
      requestAnimationFrame(() => {
        const at = this.indexes.indexOf(first);
        if (at > 12) this.list.reveal(at, "middle");
      });
    }
  }

  retheme(): void {
    this.list.refresh();
  }

  /** For paper: what fails, in the order of execution, then what is nearest to its limit. */
  printed(most: number): HTMLElement {
    const { rows } = this.state;
    const kept = ["status", "site", "port", "slot", "step", "severity", "relative_l2", "cosine", "max_abs_error", "class"]
      .map((id) => this.columns.find((c) => c.id === id))
      .filter((c): c is ColumnView => c !== undefined && (!c.needed || c.needed()));
    const all = Array.from({ length: rows.count }, (_, row) => row);
    const failing = all.filter((row) => rows.status(row) === "fail");
    const others = all.filter((row) => rows.status(row) !== "fail");
    others.sort((a, b) => (rows.severity(b) ?? 0) - (rows.severity(a) ?? 0));
    const shown = [...failing, ...others].slice(0, most);
    return h(
      "table",
      { class: "printed" },
      h("caption", null, `${count(shown.length)} of ${count(rows.count)} rows`),
      h("thead", null, h("tr", null, ...kept.map((c) => h("th", null, c.label)))),
      h("tbody", null, ...shown.map((row) => h("tr", null, ...kept.map((c) => h("td", null, c.text(row)))))),
    );
  }

  private controls(): HTMLElement {
    const { rows } = this.state;
    const ports = new Set<string>();
    for (let row = 0; row < rows.count; row++) ports.add(rows.port(row));
    this.drawChips();
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.apply(), 90);
    });
    return h(
      "div",
      { class: "controls" },
      this.chips,
      this.search,
      ports.size > 1 &&
        h(
          "label",
          null,
          "port ",
          h(
            "select",
            {
              on: {
                change: (event: Event) => {
                  this.port = (event.target as HTMLSelectElement).value;
                  this.apply();
                },
              },
            },
            h("option", { value: "" }, "all"),
            ...[...ports].map((port) => h("option", { value: port }, port)),
          ),
        ),
      this.columnMenu(),
      h("button", { type: "button", class: "copy", on: { click: (event: Event) => void this.copy(event.currentTarget as HTMLElement) } }, "Copy as CSV"),
      this.told,
    );
  }

  private columnMenu(): HTMLElement {
    return h(
      "details",
      { class: "menu" },
      h("summary", null, "Columns"),
      h(
        "div",
        { class: "menu-body" },
        ...this.columns.map((column) =>
          h(
            "label",
            { title: column.title },
            h("input", {
              type: "checkbox",
              checked: this.shownColumns.includes(column),
              on: {
                change: (event: Event) => {
                  const on = (event.target as HTMLInputElement).checked;
                  if (on) this.extra.add(column.id);
                  this.shownColumns = this.columns.filter((c) => (c === column ? on : this.shownColumns.includes(c)));
                  this.drawHead();
                  for (const row of this.list.body.children) row.replaceChildren();
                  this.list.refresh();
                },
              },
            }),
            column.label,
          ),
        ),
      ),
    );
  }

  private drawChips(): void {
    const { rows } = this.state;
    const counts = new Map<string, number>();
    for (let row = 0; row < rows.count; row++) counts.set(rows.status(row), (counts.get(rows.status(row)) ?? 0) + 1);
    const chip = (status: string, label: string, size: number) =>
      h(
        "button",
        {
          type: "button",
          class: status,
          "aria-pressed": String(this.status === status),
          on: {
            click: () => {
              this.status = status;
              this.drawChips();
              this.apply();
            },
          },
        },
        label,
        h("small", null, count(size)),
      );
    clear(
      this.chips,
      chip("", "all", rows.count),
      ...["fail", "incomparable", "missing", "extra", "unjudged", "pass"].filter((status) => counts.has(status)).map((status) => chip(status, status, counts.get(status)!)),
    );
  }

  private drawHead(): void {
    const gap = this.shownColumns.map((c) => c.width).join(" ");
    this.grid.style.setProperty("--columns", gap);
    const least = this.shownColumns.reduce((sum, c) => sum + Number(/([\d.]+)rem/.exec(c.width)![1]), 0);
    this.grid.style.setProperty("--least", `${least}rem`);
    clear(
      this.headRow,
      ...this.shownColumns.map((column) =>
        h(
          "div",
          {
            role: "columnheader",
            class: column.align,
            "aria-sort": this.sortBy === column.id ? (this.descending ? "descending" : "ascending") : "none",
          },
          h(
            "button",
            { type: "button", title: `${column.title}; sort by it`, on: { click: () => this.sort(column) } },
            column.label,
            h("i", { "aria-hidden": "true" }, this.sortBy === column.id ? (this.descending ? "▾" : "▴") : ""),
          ),
        ),
      ),
    );
  }

  private sort(column: ColumnView): void {
    if (this.sortBy === column.id) {
      // Third click: back to the order of execution.
      const numbersFirst = column.align === "right";
      if (this.descending === numbersFirst) this.descending = !numbersFirst;
      else {
        this.sortBy = "order";
        this.descending = false;
      }
    } else {
      this.sortBy = column.id;
      this.descending = column.align === "right";
    }
    this.drawHead();
    this.apply();
  }

  private apply(): void {
    const { rows } = this.state;
    const tests = this.tests();
    const kept: number[] = [];
    for (let row = 0; row < rows.count; row++) if (tests.every((test) => test(row))) kept.push(row);
    const column = this.columns.find((c) => c.id === this.sortBy);
    if (column && this.sortBy !== "order") {
      const keys = new Map<number, string | number>(kept.map((row) => [row, column.key(row)]));
      const sign = this.descending ? -1 : 1;
      kept.sort((a, b) => {
        const [x, y] = [keys.get(a)!, keys.get(b)!];
        return x < y ? -sign : x > y ? sign : a - b;
      });
    }
    this.indexes = Int32Array.from(kept);
    this.active = this.state.choice ? this.indexes.indexOf(this.state.choice.row) : -1;
    const shown = kept.length === rows.count ? `${count(rows.count)} rows` : `${count(kept.length)} of ${count(rows.count)} rows`;
    this.told.textContent = [shown, this.complaint].filter(Boolean).join("; ");
    const words = this.search.value.trim();
    const filters = [words && `“${words}”`, this.status, this.port].filter(Boolean).join(", ");
    this.grid.dataset["empty"] = this.complaint || `No row matches ${filters}: clear the search, or choose “all”.`;
    this.grid.setAttribute("aria-rowcount", String(kept.length + 1));
    this.grid.classList.toggle("empty", kept.length === 0);
    this.list.setCount(kept.length);
  }

  private tests(): ((row: number) => boolean)[] {
    const { rows } = this.state;
    this.complaint = "";
    const tests: ((row: number) => boolean)[] = [];
    if (this.status) tests.push((row) => rows.status(row) === this.status);
    if (this.port) tests.push((row) => rows.port(row) === this.port);
    for (const word of this.search.value.toLowerCase().split(/\s+/).filter(Boolean)) {
      const asked = /^([a-z_0-9]+)(<=|>=|<|>|=)(.+)$/.exec(word);
      const known = asked && (rows.metrics.includes(asked[1]) || ["step", "rank", "visit", "severity", "limit", "order"].includes(asked[1]));
      if (asked && known) {
        const read = rows.metrics.includes(asked[1]) ? rows.metric(asked[1]) : rows.field(asked[1]);
        const limit = asked[3] === "inf" ? Infinity : Number(asked[3]);
        const sign = asked[2];
        if (asked[3] === "nan") tests.push((row) => Number.isNaN(read(row) ?? 0));
        else if (Number.isNaN(limit)) this.complaint = `“${asked[3]}” is no number`;
        else
          tests.push((row) => {
            const value = read(row);
            if (value === null) return false;
            if (sign === ">") return value > limit;
            if (sign === "<") return value < limit;
            if (sign === ">=") return value >= limit;
            if (sign === "<=") return value <= limit;
            return value === limit;
          });
        continue;
      }
      if (asked) this.complaint = `there is no figure “${asked[1]}”; there are ${rows.metrics.slice(0, 4).join(", ")} …, step, rank, severity`;
      const fields = ["site", "slot", "class", "candidate_class", "candidate_site", "reason", "reference_dtype", "candidate_dtype", "port"].map((name) => rows.text(name));
      tests.push((row) => fields.some((field) => field(row).toLowerCase().includes(word)));
    }
    return tests;
  }

  private fill(element: HTMLElement, index: number): void {
    const { rows, choice, data } = this.state;
    const row = this.indexes[index];
    while (element.children.length < this.shownColumns.length) element.append(h("div", { role: "gridcell" }, document.createTextNode("")));
    const status = rows.status(row);
    element.className = `grid-row is-${status}${choice?.row === row ? " chosen" : ""}${index === this.active ? " active" : ""}${data.verdict.row === row ? " first" : ""}`;
    element.id = `row-${index}`;
    element.dataset["index"] = String(index);
    element.setAttribute("aria-rowindex", String(index + 2));
    for (let at = 0; at < this.shownColumns.length; at++) {
      const column = this.shownColumns[at];
      const cell = element.children[at] as HTMLElement;
      const text = column.text(row);
      const node = cell.firstChild as Text;
      if (node.data !== text) node.data = text;
      const name = `c-${column.id.startsWith("c") ? "x" : ""}${column.id} ${column.align}`;
      if (cell.className !== name) cell.className = name;
      if (column.id === "severity") {
        if (text) {
          const colours = heat(rows.severity(row) ?? 0);
          cell.style.background = colours.back;
          cell.style.color = colours.ink;
        } else cell.style.background = cell.style.color = "";
      } else if (cell.style.background) cell.style.background = cell.style.color = "";
      if (column.id === "site" || column.id === "reason") cell.title = text;
    }
  }

  private take(): void {
    const row = this.indexes[this.active];
    if (row === undefined) return;
    this.state.choose(this.state.rows.site(row), row, "rows");
    this.list.refresh();
  }

  private key(event: KeyboardEvent): void {
    if (event.target !== this.grid || event.altKey || event.ctrlKey || event.metaKey) return;
    const last = this.indexes.length - 1;
    let next = this.active;
    if (event.key === "ArrowDown") next = Math.min(last, next + 1);
    else if (event.key === "ArrowUp") next = Math.max(0, next - 1);
    else if (event.key === "PageDown") next = Math.min(last, next + 15);
    else if (event.key === "PageUp") next = Math.max(0, next - 15);
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else if (event.key === "Enter") return this.take();
    else if (event.key === "/") {
      event.preventDefault();
      return this.search.focus();
    } else return;
    event.preventDefault();
    this.active = next;
    this.list.reveal(next);
    this.list.refresh();
    this.grid.setAttribute("aria-activedescendant", `row-${next}`);
  }

  private async copy(button: HTMLElement): Promise<void> {
    const text = csvOf(this.state.rows, this.indexes);
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
      area.value = text;
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    const before = button.textContent;
    button.textContent = done ? `Copied ${count(this.indexes.length)} rows` : "The browser refused";
    setTimeout(() => (button.textContent = before), 1600);
  }
}
