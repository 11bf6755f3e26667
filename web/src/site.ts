// The detail of one site: its tensors, all metrics of one of them, pictures, and its neighbours.

import type { State } from "./state";
import { clear, dotted, h } from "./dom";
import { fig, metricFigure, times } from "./format";
import { heat } from "./colour";
import { figure } from "./packing";
import { replacePictures } from "./pictures";

const SIGNS: Record<string, string> = { lower: "≤", higher: "≥", zero: "within ±" };

export class SiteDetail {
  readonly element = h("div", { class: "site-detail", tabindex: 0, role: "region", "aria-label": "Detail of the chosen site" });
  private readonly producers = new Map<string, string[]>();
  private readonly consumers = new Map<string, string[]>();
  private order: string[] | null = null;

  constructor(private readonly state: State) {
    const { flow } = state.data;
    if (flow) {
      const push = (map: Map<string, string[]>, key: string, value: string) => {
        const known = map.get(key);
        if (known) known.push(value);
        else map.set(key, [value]);
      };
      for (let i = 0; i < flow.from.length; i++) {
        const [maker, taker] = [flow.sites[flow.from[i]], flow.sites[flow.to[i]]];
        push(this.producers, taker, maker);
        push(this.consumers, maker, taker);
      }
    }
    state.onChoice(() => this.draw());
    this.draw();
  }

  retheme(): void {
    this.draw();
  }

  private draw(): void {
    const { choice, rows, data } = this.state;
    if (!choice) {
      clear(this.element, h("p", { class: "remark empty" }, "Choose a module in the tree, a point of the chart or a row of the table."));
      return;
    }
    const { site, row } = choice;
    const status = rows.status(row);
    const first = data.verdict.site === site;
    const kind = rows.className(row) + (rows.otherClass(row) ? ` → ${rows.otherClass(row)}` : "");
    const link = h("a", { href: this.state.fragment(site, row), class: "anchor", title: "Link to this site", "aria-label": "Link to this site" }, "#");
    const pictures = h("div", { class: "pictures-place" });
    const tensors = h("div", { class: "tensor-place" });
    clear(
      this.element,
      h(
        "header",
        null,
        h("h3", { "aria-live": "polite" }, dotted(site), " ", link),
        h(
          "p",
          null,
          kind && h("code", null, kind),
          first && h("span", { class: "badge small fail" }, "the drift starts here"),
          ...this.findings(site),
        ),
      ),
      this.neighbours(site),
      this.tensorList(site, row),
      h(
        "section",
        { class: "tensor" },
        h(
          "h4",
          null,
          `${rows.port(row)} `,
          h("code", null, rows.slot(row)),
          " ",
          h("span", { class: `badge small ${status}` }, status),
        ),
        rows.reason(row) && h("p", { class: "reason" }, rows.reason(row)),
        this.facts(row),
        h("div", { class: "tensor-body" }, this.metrics(row), pictures),
        tensors,
      ),
    );
    this.drawPictures(pictures, row);
    this.state.source.tensors?.show(row, tensors);
  }

  private drawPictures(into: HTMLElement, row: number): void {
    const why =
      this.state.source.kind === "remote"
        ? "There are no values to draw."
        : this.state.rows.compared(row)
          ? Object.keys(this.state.data.pictures).length
            ? "Pictures are kept for the worst tensors only; `driftline view` draws any of them."
            : "No pictures: the tensors were not at hand when this page was made."
          : "There is nothing to draw: this tensor was not compared.";
    void this.state.source.pictures(row).then((found) => {
      if (this.state.choice?.row === row) replacePictures(into, found, why);
    });
  }

  private findings(site: string): HTMLElement[] {
    return this.state.findingsOf(site).map((found) => {
      const where = found.direction === "forward" ? "" : `${found.direction}: `;
      const inside = found.inside ? ` in ${found.inside}` : "";
      const cause = found.cause && found.cause !== "unknown" ? `, ${found.cause}` : "";
      const error = found.error === null ? "" : ` · error ${fig(figure(found.error))}`;
      const given = found.error_in === null ? "" : ` from ${fig(figure(found.error_in))} in`;
      const noise = found.noise === null ? "" : ` · normal ${fig(figure(found.noise))}`;
      return h("span", { class: `status ${found.status}`, title: found.reason }, `${where}${found.status}${inside}${cause}${error}${given}${noise}`);
    });
  }

  private neighbours(site: string): HTMLElement {
    const known = this.state.data.flow !== null;
    const inner = (sites: string[] | undefined) => {
      const all = sites ?? [];
      return all.filter((one) => !all.some((other) => other !== one && other.startsWith(one) && /[./]/.test(other[one.length] ?? "")));
    };
    const makers = inner(this.producers.get(site));
    const takers = inner(this.consumers.get(site));
    const [before, after] = this.around(site);
    const side = (label: string, found: string[], ran: string | null, when: string) =>
      h(
        "p",
        null,
        h("b", null, label),
        ...(found.length ? found.slice(0, 8).map((each) => this.chip(each)) : ran ? [h("span", { class: "quiet" }, known ? `not in a captured tensor; ${when} ` : `${when} `), this.chip(ran)] : [h("span", { class: "quiet" }, "not known")]),
        found.length > 8 && h("span", { class: "quiet" }, ` and ${found.length - 8} more`),
      );
    return h("nav", { class: "neighbours", "aria-label": "Producers and consumers" }, side("fed by", makers, before, "ran before:"), side("feeds", takers, after, "ran next:"));
  }

  private around(site: string): [string | null, string | null] {
    if (!this.order) {
      const { rows, data } = this.state;
      const line = data.depth.forward ?? data.depth.backward ?? data.depth.optimizer;
      const seen = new Set<string>();
      if (line) for (let i = 0; i < line.rows.length; i++) seen.add(rows.site(line.rows[i]));
      this.order = [...seen];
    }
    const at = this.order.indexOf(site);
    if (at < 0) return [null, null];
    return [this.order[at - 1] ?? null, this.order[at + 1] ?? null];
  }

  private chip(site: string): HTMLElement {
    const { rows } = this.state;
    if (!rows.hasSite(site)) {
      const between = /^(?:(.*)\.)?between\d+$/.exec(site);
      return h("span", { class: "chip" }, between ? `code of ${between[1] ?? "the model"}` : site);
    }
    const own = rows.heatOf(this.state.inStep(rows.rowsOf(site)));
    const cell = h("i", { class: "dot", "aria-hidden": "true" });
    cell.style.background = heat(own.severity).back;
    return h(
      "a",
      {
        class: "chip",
        href: this.state.fragment(site),
        title: `${site}: worst ${times(own.severity)} its limit`,
        on: {
          click: (event: Event) => {
            event.preventDefault();
            this.state.choose(site);
          },
        },
      },
      cell,
      site,
    );
  }

  private tensorList(site: string, chosen: number): HTMLElement | null {
    const { rows } = this.state;
    const own = rows.rowsOf(site);
    if (own.length < 2) return null;
    const most = 60;
    const at = own.indexOf(chosen);
    const from = own.length > most ? Math.max(0, Math.min(own.length - most, at - most / 2)) : 0;
    const several = rows.steps.length > 1 || rows.ranks.length > 1;
    return h(
      "div",
      { class: "tensors", role: "group", "aria-label": "Tensors of this site" },
      ...own.slice(from, from + most).map((row) => {
        const compared = rows.compared(row);
        const cell = h("i", { class: "dot" });
        if (compared) cell.style.background = heat(rows.severity(row) ?? 0).back;
        const where = several ? ` s${rows.step(row)}${rows.ranks.length > 1 ? ` r${rows.rank(row)}` : ""}` : "";
        const visit = rows.visit(row) ? ` #${rows.visit(row)}` : "";
        return h(
          "button",
          {
            type: "button",
            "aria-pressed": String(row === chosen),
            class: rows.status(row),
            on: { click: () => this.state.choose(site, row) },
          },
          cell,
          `${rows.port(row)} `,
          h("code", null, rows.slot(row)),
          `${where}${visit}`,
          compared && rows.decidedBy(row) ? h("small", null, times(rows.severity(row))) : h("small", null, rows.status(row)),
        );
      }),
      own.length > most && h("span", { class: "quiet" }, `${own.length - most} more in the table below`),
    );
  }

  private facts(row: number): HTMLElement {
    const { rows } = this.state;
    const pairs: [string, string][] = [];
    const both = (name: string, one: string, other: string) => {
      const [a, b] = [rows.text(one)(row), rows.text(other)(row)];
      if (a || b) pairs.push([name, a === b || !b ? a : !a ? b : `${a} → ${b}`]);
    };
    both("dtype", "reference_dtype", "candidate_dtype");
    both("shape", "reference_shape", "candidate_shape");
    const other = ["candidate_site", "candidate_port", "candidate_slot"].map((name) => rows.text(name)(row)).filter(Boolean);
    if (other.length) pairs.push(["in the candidate", other.join(" ")]);
    const by = rows.text("by")(row);
    if (by && by !== "name") pairs.push(["paired by", `${by}, ${fig(rows.field("confidence")(row))} sure`]);
    for (const side of ["reference", "candidate"]) {
      const recipe = rows.text(`${side}_recipe`)(row);
      if (recipe) pairs.push([`${side} first`, recipe]);
    }
    if (rows.text("basis")(row) && rows.text("basis")(row) !== "values") pairs.push(["measured from", rows.text("basis")(row)]);
    pairs.push(["place", `step ${rows.step(row)}, rank ${rows.rank(row)}, order ${rows.order(row)}, ${rows.phase(row)}`]);
    return h("dl", { class: "facts" }, ...pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
  }

  private metrics(row: number): HTMLElement | null {
    const { rows, data } = this.state;
    const measured = rows.metrics.filter((name) => rows.metric(name)(row) !== null);
    if (!measured.length) return null;
    const sides = measured.filter((name) => /^(reference|candidate)_/.test(name));
    const own = measured.filter((name) => !sides.includes(name));
    const estimated = new Set(rows.text("estimated")(row).split(" "));
    const whats = [...new Set(sides.map((name) => name.replace(/^(reference|candidate)_/, "")))];
    const decided = rows.decidedBy(row);
    return h(
      "div",
      { class: "metric-tables" },
      h(
        "table",
        { class: "plain" },
        h("thead", null, h("tr", null, h("th", null, "metric"), h("th", { class: "right" }, "value"), h("th", null, "allowed"))),
        h(
          "tbody",
          null,
          ...own.map((name) => {
            const about = data.metrics.find((each) => each.name === name);
            const decides = name === decided;
            const limit = rows.limit(row);
            return h(
              "tr",
              { class: decides ? `decides ${rows.status(row)}` : null },
              h("td", { title: about?.meaning }, h("span", null, name), about && h("small", null, about.meaning)),
              h("td", { class: "right" }, metricFigure(name, rows.metric(name)(row)), estimated.has(name) && h("small", null, "estimated")),
              h("td", null, decides && limit !== null && `${SIGNS[about?.direction ?? "lower"] ?? "≤"} ${fig(limit)} (${rows.limitFrom(row)})`),
            );
          }),
        ),
      ),
      whats.length > 0 &&
        h(
          "table",
          { class: "plain" },
          h("thead", null, h("tr", null, h("th", null, "of the values"), h("th", { class: "right" }, "reference"), h("th", { class: "right" }, "candidate"))),
          h(
            "tbody",
            null,
            ...whats.map((what) =>
              h(
                "tr",
                null,
                h("td", null, what.replaceAll("_", " ")),
                h("td", { class: "right" }, fig(measured.includes(`reference_${what}`) ? rows.metric(`reference_${what}`)(row) : null)),
                h("td", { class: "right" }, fig(measured.includes(`candidate_${what}`) ? rows.metric(`candidate_${what}`)(row) : null)),
              ),
            ),
          ),
        ),
    );
  }
}
