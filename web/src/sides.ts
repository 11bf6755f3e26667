// Where the two runs come from, and what differs between them.

import type { PageData } from "./source";
import { h } from "./dom";
import { plural } from "./format";

export function sidesView(data: PageData): HTMLElement {
  const { reference, candidate, differences, same } = data.sides;
  const numbers = differences.filter((each) => each.weight === "numbers");
  const other = differences.filter((each) => each.weight !== "numbers");
  const line = (each: (typeof differences)[number]) =>
    h("tr", null, h("th", { scope: "row" }, each.what), h("td", null, each.reference), h("td", null, each.candidate));
  const command = (side: typeof reference) => side.facts.find(([name]) => name === "command")?.[1] ?? side.path;
  return h(
    "div",
    { class: "sides" },
    h(
      "table",
      { class: "plain differences" },
      h(
        "thead",
        null,
        h("tr", null, h("th", null, ""), h("th", { scope: "col" }, "reference ", h("code", null, reference.name)), h("th", { scope: "col" }, "candidate ", h("code", null, candidate.name))),
      ),
      h("tbody", null, ...numbers.map(line), ...other.filter((each) => each.what === "command").map(line)),
    ),
    !numbers.length && h("p", { class: "remark" }, "Nothing is known that differs between the two and could change numbers."),
    h(
      "details",
      null,
      h("summary", null, `All that is known of the two${same.length ? `: ${plural(same.length, "fact")} the same` : ""}`),
      h(
        "table",
        { class: "plain differences" },
        h(
          "tbody",
          null,
          ...other.filter((each) => each.what !== "command").map(line),
          ...same.map(([what, value]) => h("tr", null, h("th", { scope: "row" }, what), h("td", { colspan: 2 }, value))),
          command(reference) === command(candidate) && h("tr", null, h("th", { scope: "row" }, "command"), h("td", { colspan: 2 }, command(reference))),
          ...(["made at"] as const).map((what) =>
            h(
              "tr",
              null,
              h("th", { scope: "row" }, what),
              h("td", null, reference.facts.find(([name]) => name === what)?.[1] ?? ""),
              h("td", null, candidate.facts.find(([name]) => name === what)?.[1] ?? ""),
            ),
          ),
          h("tr", null, h("th", { scope: "row" }, "path"), h("td", null, reference.path), h("td", null, candidate.path)),
        ),
      ),
    ),
  );
}

export function notesView(data: PageData): HTMLElement | null {
  const { notes } = data.verdict;
  if (!notes.length) return null;
  return h("ul", { class: "notes" }, ...notes.map((note) => h("li", null, note)));
}
