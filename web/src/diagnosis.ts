// Where and why, with the evidence it rests on and what more would help.

import type { DiagnosisData, SiteFinding } from "./source";
import type { State } from "./state";
import { clear, h, prose } from "./dom";
import { count, fig, percent, times } from "./format";
import { figure } from "./packing";

const ORDER = ["introduced", "amplified", "inherited", "masked", "unknown", "clean"];
const MEANS: Record<string, string> = {
  introduced: "errs by itself, beyond noise",
  amplified: "was given error and hands on more than three times as much",
  inherited: "was given error and hands it on",
  masked: "was given error and hands on none",
  unknown: "cannot be judged",
  clean: "no error beyond noise",
};

export function diagnosisView(state: State, data: DiagnosisData): HTMLElement {
  const counts = new Map<string, number>();
  for (const found of data.sites) counts.set(found.status, (counts.get(found.status) ?? 0) + 1);
  const body = h("tbody");
  let shown = "introduced";
  const list = () => {
    const some = data.sites.filter((found) => found.status === shown);
    clear(body, ...some.slice(0, 200).map((found) => line(state, found)));
    if (some.length > 200) body.append(h("tr", null, h("td", { colspan: 6 }, `and ${count(some.length - 200)} more`)));
  };
  const known = ORDER.filter((status) => counts.has(status));
  if (!counts.has(shown)) shown = known[0] ?? "clean";
  const tabs = h("div", { class: "segmented", role: "group", "aria-label": "Status of sites" });
  const draw = () => {
    clear(
      tabs,
      ...known.map((status) =>
        h(
          "button",
          {
            type: "button",
            "aria-pressed": String(status === shown),
            title: MEANS[status],
            on: {
              click: () => {
                shown = status;
                draw();
              },
            },
          },
          status,
          h("small", null, count(counts.get(status)!)),
        ),
      ),
    );
    list();
  };
  draw();
  const evidence = data.evidence as Record<string, unknown>;
  const facts: [string, string][] = [
    ["confidence", percent(data.confidence)],
    ["false alarms", data.false_alarm_rate === null ? "no rate can be stated from two runs alone" : `${percent(data.false_alarm_rate)} per clean site`],
  ];
  if (data.explains !== null) facts.push(["share of the final error", percent(data.explains)]);
  const jump = evidence["jump"] as Record<string, unknown> | undefined;
  if (jump && typeof jump["site"] === "string") facts.push(["jump along the depth", `${fig(figure(jump["before"]))} to ${fig(figure(jump["after"]))} at ${jump["site"]}`]);
  const judged = evidence["judged_by"] as Record<string, number> | undefined;
  if (judged) facts.push(["sites judged by", Object.entries(judged).map(([by, n]) => `${by} ${count(n)}`).join(", ")]);
  const cause = evidence["cause"] as Record<string, unknown> | undefined;
  const others = (cause?.["others"] as [string, unknown][] | undefined)?.slice(0, 4) ?? [];
  if (cause && typeof cause["explained"] === "number") facts.push(["the cause takes away", `${percent(cause["explained"])} of the error beyond noise`]);
  if (others.length) facts.push(["next best causes", others.map(([name, score]) => `${name}${typeof score === "number" ? ` ${percent(Math.max(0, score))}` : ""}`).join(", ")]);
  return h(
    "div",
    { class: "diagnosis" },
    h("ul", { class: "sentences" }, ...data.finding.map((sentence) => h("li", null, ...prose(sentence)))),
    h("dl", { class: "facts" }, ...facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    tabs,
    h(
      "div",
      { class: "scroll-x site-list", tabindex: 0, role: "region", "aria-label": "Sites by status" },
      h(
        "table",
        { class: "plain" },
        h(
          "thead",
          null,
          h("tr", null, h("th", null, "site"), ...["error", "given", "normal", "of limit"].map((name) => h("th", { class: "right" }, name)), h("th", null, "why")),
        ),
        body,
      ),
    ),
    data.needs.length > 0 && h("details", null, h("summary", null, "What would make it surer"), h("ul", { class: "notes" }, ...data.needs.map((need) => h("li", null, ...prose(need))))),
  );
}

function line(state: State, found: SiteFinding): HTMLElement {
  const number = (value: unknown) => (value === null ? "" : fig(figure(value)));
  const cause = found.cause ? `${found.cause}${found.reason ? "; " : ""}` : "";
  return h(
    "tr",
    null,
    h(
      "td",
      null,
      state.rows.hasSite(found.site) ? h("a", { href: state.fragment(found.site) }, found.site) : found.site,
      found.direction !== "forward" && h("small", null, found.direction),
    ),
    h("td", { class: "right" }, number(found.error)),
    h("td", { class: "right" }, number(found.error_in)),
    h("td", { class: "right" }, number(found.noise)),
    h("td", { class: "right" }, found.ratio === null ? "" : times(figure(found.ratio))),
    h("td", null, `${cause}${found.reason}`, found.inside && ` in ${found.inside}`),
  );
}
