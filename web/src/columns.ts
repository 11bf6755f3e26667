// What a row of the table can show, and the same as CSV.

import type { Rows } from "./rows";
import type { State } from "./state";
import { fig, metricFigure, times } from "./format";

export interface ColumnView {
  id: string;
  label: string;
  title: string;
  width: string;
  align: "left" | "right";
  text: (row: number) => string;
  key: (row: number) => string | number;
  usual: boolean;
  needed?: () => boolean;
}

const FIELDS = [
  ...["site", "port", "slot", "step", "rank", "visit", "process", "phase", "moment", "order", "status", "reason"],
  ...["candidate_site", "candidate_port", "candidate_slot", "candidate_step", "candidate_visit", "candidate_rank"],
  ...["by", "confidence", "reference_recipe", "candidate_recipe", "class", "candidate_class", "reference_dtype"],
  ...["candidate_dtype", "reference_shape", "candidate_shape", "basis", "estimated", "decided_by", "limit"],
  ...["limit_from", "severity"],
];

/** Every column there can be; a table shows the usual ones first. */
export function columnViews(state: State): ColumnView[] {
  const { rows, data } = state;
  const text = (id: string, label: string, width: string, get: (row: number) => string, usual = true): ColumnView => ({
    id,
    label,
    title: label,
    width,
    align: "left",
    text: get,
    key: get,
    usual,
  });
  const other = rows.text("candidate_site");
  const [here, there] = [rows.text("reference_dtype"), rows.text("candidate_dtype")];
  const [shape, otherShape] = [rows.text("reference_shape"), rows.text("candidate_shape")];
  let [longest, longestPort] = [0, 0]; // a phone has no room for a word that no row has
  for (let row = 0; row < rows.count; row++) {
    longest = Math.max(longest, rows.status(row).length);
    longestPort = Math.max(longestPort, rows.port(row).length);
  }
  const rank: Record<string, number> = { fail: 0, incomparable: 1, missing: 2, extra: 3, unjudged: 4, pass: 5 };
  const figure = (id: string, label: string, title: string, get: (row: number) => number | null, show: (row: number) => string, usual: boolean): ColumnView => ({
    id,
    label,
    title,
    width: "6.6rem",
    align: "right",
    text: show,
    key: (row) => {
      const value = get(row);
      return value === null ? -Infinity : Number.isNaN(value) ? Infinity : value;
    },
    usual,
  });
  const whole = (id: string, get: (row: number) => number | null, needed: () => boolean): ColumnView => ({
    ...figure(id, id, id, get, (row) => String(get(row) ?? ""), true),
    width: "3.6rem",
    needed,
  });
  const usualMetrics = new Set(["relative_l2", "cosine", "max_abs_error"]);
  const standard = new Set(["mean_abs_error", "rmse", "max_rel_error", "mean_rel_error", "projection", "max_ulp", "outside_share", "different", "one_sided"]);
  return [
    { ...text("status", "status", longest > 8 ? "8.2rem" : "6.2rem", rows.status), key: (row) => rank[rows.status(row)] ?? 9 },
    {
      ...text("site", "site", "minmax(17rem, 3fr)", (row) => {
        const visit = rows.visit(row);
        return rows.site(row) + (visit ? `#${visit}` : "") + (other(row) ? ` ~ ${other(row)}` : "");
      }),
      key: rows.site,
    },
    text("port", "port", longestPort > 6 ? "8.2rem" : "5.6rem", rows.port),
    text("slot", "slot", "6.4rem", rows.slot),
    whole("step", rows.step, () => rows.steps.length > 1),
    whole("rank", rows.rank, () => rows.ranks.length > 1),
    figure("order", "order", "place in the order of execution", rows.order, (row) => String(rows.order(row) ?? ""), false),
    {
      ...figure("severity", "of limit", "value over its limit: above 1 is outside", rows.severity, (row) => (rows.compared(row) && rows.decidedBy(row) ? times(rows.severity(row)) : ""), true),
      width: "5rem",
    },
    text("decided_by", "decided by", "7rem", rows.decidedBy, false),
    figure("limit", "limit", "what was allowed", rows.limit, (row) => fig(rows.limit(row)), false),
    ...rows.metrics.map((name) => {
      const about = data.metrics.find((each) => each.name === name);
      const read = rows.metric(name);
      const known = usualMetrics.has(name) || standard.has(name) || /_(at|min|max|mean|std|l2|nan|inf)$/.test(name);
      return {
        ...figure(name, name, about?.meaning ?? name, read, (row) => metricFigure(name, read(row)), usualMetrics.has(name) || !known),
        width: name.length > 14 ? "9.5rem" : name.length > 11 ? "8.8rem" : "6.8rem",
      };
    }),
    text("dtype", "dtype", "9.8rem", (row) => (here(row) === there(row) || !there(row) ? here(row) || there(row) : `${here(row)} → ${there(row)}`)),
    text("shape", "shape", "7.5rem", (row) => (shape(row) === otherShape(row) || !otherShape(row) ? shape(row) || otherShape(row) : `${shape(row)} → ${otherShape(row)}`)),
    text("class", "class", "9rem", (row) => rows.className(row) + (rows.otherClass(row) ? ` → ${rows.otherClass(row)}` : "")),
    text("reason", "why", "minmax(14rem, 4fr)", rows.reason),
  ];
}

/** All fields and metrics of these rows, in their order; as rows.csv has them. */
export function csvOf(rows: Rows, indexes: Iterable<number>): string {
  const texts = new Set(["site", "port", "slot", "phase", "moment", "status", "reason", "by", "class", "basis", "estimated", "decided_by", "limit_from"]);
  const isText = (name: string) => texts.has(name) || (name.startsWith("candidate_") && !/step|visit|rank/.test(name)) || name.startsWith("reference_");
  const readers = [
    ...FIELDS.map((name) => (isText(name) ? rows.text(name) : plain(rows.field(name)))),
    ...rows.metrics.map((name) => plain(rows.metric(name))),
  ];
  const lines = [[...FIELDS, ...rows.metrics].map(quoted).join(",")];
  for (const row of indexes) lines.push(readers.map((read) => quoted(read(row))).join(","));
  return lines.join("\n") + "\n";
}

function plain(read: (row: number) => number | null): (row: number) => string {
  return (row) => {
    const value = read(row);
    if (value === null) return "";
    if (Number.isNaN(value)) return "nan";
    if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
    return String(value);
  };
}

function quoted(text: string): string {
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
