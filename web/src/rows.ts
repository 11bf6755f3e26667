// Rows of the table, read from columns where they lie, and what follows for sites and subtrees.

import type { ColumnData, PageData } from "./source";

export type TextOf = (row: number) => string;
export type NumberOf = (row: number) => number | null;

export function textColumn(column: ColumnData | undefined): TextOf {
  if (!column) return () => "";
  if ("words" in column) {
    const { words, codes } = column;
    return (row) => words[codes[row]];
  }
  if ("same" in column) {
    const same = column.same === null ? "" : String(column.same);
    return () => same;
  }
  const read = numberColumn(column);
  return (row) => String(read(row) ?? "");
}

export function numberColumn(column: ColumnData | undefined): NumberOf {
  if (!column || "words" in column) return () => null;
  if ("same" in column) {
    const same = column.same === null ? null : special(column.same);
    return () => same;
  }
  const { numbers, absent } = column;
  if (!absent) return (row) => numbers[row];
  return (row) => (absent[row] ? null : numbers[row]);
}

function special(value: string | number): number {
  if (typeof value === "number") return value;
  return value === "inf" ? Infinity : value === "-inf" ? -Infinity : NaN;
}

export const STATUSES = ["fail", "incomparable", "missing", "extra", "unjudged", "pass"] as const;
const RANKS: Record<string, number> = { fail: 5, incomparable: 3, missing: 2, extra: 1, unjudged: 1, pass: 0 };

export interface Heat {
  /** Largest value over its limit. */
  severity: number;
  failing: number;
  compared: number;
  rows: number;
  rank: number;
}

export class Rows {
  readonly count: number;
  readonly metrics: string[];
  readonly site: TextOf;
  readonly port: TextOf;
  readonly slot: TextOf;
  readonly status: TextOf;
  readonly reason: TextOf;
  readonly phase: TextOf;
  readonly className: TextOf;
  readonly otherClass: TextOf;
  readonly decidedBy: TextOf;
  readonly limitFrom: TextOf;
  readonly severity: NumberOf;
  readonly limit: NumberOf;
  readonly step: NumberOf;
  readonly rank: NumberOf;
  readonly visit: NumberOf;
  readonly process: NumberOf;
  readonly order: NumberOf;
  readonly steps: number[];
  readonly ranks: number[];
  private readonly texts = new Map<string, TextOf>();
  private readonly figures = new Map<string, NumberOf>();
  private readonly bySite = new Map<string, number[]>();

  constructor(private readonly data: PageData) {
    this.count = data.rows.count;
    this.metrics = Object.keys(data.rows.metrics);
    this.site = this.text("site");
    this.port = this.text("port");
    this.slot = this.text("slot");
    this.status = this.text("status");
    this.reason = this.text("reason");
    this.phase = this.text("phase");
    this.className = this.text("class");
    this.otherClass = this.text("candidate_class");
    this.decidedBy = this.text("decided_by");
    this.limitFrom = this.text("limit_from");
    this.severity = this.field("severity");
    this.limit = this.field("limit");
    this.step = this.field("step");
    this.rank = this.field("rank");
    this.visit = this.field("visit");
    this.process = this.field("process");
    this.order = this.field("order");
    const steps = new Set<number>();
    const ranks = new Set<number>();
    for (let row = 0; row < this.count; row++) {
      const site = this.site(row);
      const known = this.bySite.get(site);
      if (known) known.push(row);
      else this.bySite.set(site, [row]);
      steps.add(this.step(row) ?? 0);
      ranks.add(this.rank(row) ?? 0);
    }
    this.steps = [...steps].sort((a, b) => a - b);
    this.ranks = [...ranks].sort((a, b) => a - b);
  }

  text(name: string): TextOf {
    let read = this.texts.get(name);
    if (!read) this.texts.set(name, (read = textColumn(this.data.rows.columns[name])));
    return read;
  }

  field(name: string): NumberOf {
    let read = this.figures.get(name);
    if (!read) this.figures.set(name, (read = numberColumn(this.data.rows.columns[name])));
    return read;
  }

  metric(name: string): NumberOf {
    const key = `metric ${name}`;
    let read = this.figures.get(key);
    if (!read) this.figures.set(key, (read = numberColumn(this.data.rows.metrics[name])));
    return read;
  }

  rowsOf(site: string): number[] {
    return this.bySite.get(site) ?? [];
  }

  hasSite(site: string): boolean {
    return this.bySite.has(site);
  }

  sites(): string[] {
    return [...this.bySite.keys()];
  }

  compared(row: number): boolean {
    const status = this.status(row);
    return status === "pass" || status === "fail" || status === "unjudged";
  }

  /** The value that the row's status hangs on. */
  decided(row: number): number | null {
    const name = this.decidedBy(row);
    return name ? this.metric(name)(row) : null;
  }

  /** Which of a site's rows a reader wants first: the failing output, else the worst output. */
  leading(site: string): number {
    let best = -1;
    let score = -1;
    for (const row of this.rowsOf(site)) {
      const gives = this.port(row) === "output" ? 1 : this.port(row) === "input" ? 0 : 0.5;
      const severity = this.severity(row) ?? 0;
      const own = (this.status(row) === "fail" ? 1000 : 0) + gives * 100 + Math.min(99, Number.isNaN(severity) ? 99 : severity);
      if (own > score) {
        score = own;
        best = row;
      }
    }
    return best;
  }

  heatOf(rows: Iterable<number>): Heat {
    const heat: Heat = { severity: 0, failing: 0, compared: 0, rows: 0, rank: -1 };
    for (const row of rows) {
      const status = this.status(row);
      heat.rows++;
      heat.rank = Math.max(heat.rank, RANKS[status] ?? 0);
      if (!this.compared(row)) continue;
      heat.compared++;
      if (status === "fail") heat.failing++;
      const severity = this.severity(row) ?? 0;
      heat.severity = Math.max(heat.severity, Number.isNaN(severity) ? Infinity : severity);
    }
    return heat;
  }
}
