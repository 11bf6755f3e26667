// The page: a headline that is there already, and what can be looked at below it.

import "./page.css";
import { PASSES, type PageData, type Source } from "./source";
import { State } from "./state";
import { h, put } from "./dom";
import { Depth } from "./depth";
import { Flow } from "./flow";
import { Tree } from "./tree";
import { SiteDetail } from "./site";
import { RowTable } from "./table";
import { notesView, sidesView } from "./sides";
import { diagnosisView } from "./diagnosis";
import { decoderView } from "./decoder";
import { themeButton } from "./theme";
import { heatGradient } from "./colour";
import { count, plural } from "./format";

interface Themed {
  retheme(): void;
}

/** Build the page from whatever source it has; the report and the viewer differ in nothing else. */
export async function start(open: () => Source | Promise<Source>): Promise<void> {
  const app = document.getElementById("app")!;
  try {
    performance.mark("script");
    const source = await open();
    const data = await source.page();
    performance.mark("data");
    const started = performance.now();
    build(app, data, source);
    document.documentElement.dataset["built"] = String(Math.round(performance.now() - started));
  } catch (trouble) {
    put(app, h("p", { class: "note bad-text", role: "alert" }, `This page cannot show its data: ${trouble instanceof Error ? trouble.message : String(trouble)}`));
  }
  app.removeAttribute("aria-busy");
  performance.mark("ready");
  document.documentElement.dataset["ready"] = "yes";
}

function section(id: string, title: string, about: string, ...inside: (Node | null | false)[]): HTMLElement {
  return h(
    "section",
    { id, class: "block", "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title, about ? h("small", null, about) : null),
    ...inside,
  );
}

function build(app: HTMLElement, data: PageData, source: Source): void {
  const state = new State(data, source);
  const themed: Themed[] = [];
  const add = <T extends Themed>(view: T): T => {
    themed.push(view);
    return view;
  };
  const { rows } = state;
  const blocks: [string, string, HTMLElement][] = [];
  if (rows.count) {
    const places = h("div", { class: "split" });
    const tree = add(new Tree(state));
    const detail = add(new SiteDetail(state));
    const scale = h("i", { class: "scale" });
    const paintScale = () => (scale.style.background = heatGradient());
    paintScale();
    add({ retheme: paintScale });
    const depth = PASSES.some((pass) => data.depth[pass]) ? add(new Depth(state)) : null;
    if (depth) blocks.push(["depth", "Depth", section("depth", "Error along the depth", "in the order of execution", depth.element)]);
    const flow = new Flow(state);
    if (flow.worthIt) {
      add(flow);
      const about = data.verdict.site === null ? "error as colour; a click goes into a module" : "around the first divergence; a click goes into a module";
      blocks.push(["flow", "Dataflow", section("flow", "Dataflow", about, flow.element)]);
    }
    places.append(
      section("modules", "Modules", `worst tensor below each${state.step === null ? "" : ` in step ${state.step}`}, as a multiple of its limit`, tree.element, h("p", { class: "remark scale-legend" }, "well inside ", scale, " far beyond its limit")),
      section("site", "Site", "", detail.element),
    );
    blocks.push(["modules", "Modules", places]);
  }
  blocks.push(["runs", "Runs", section("runs", "What differs between the runs", "", notesView(data), data.sides.reference.path || rows.count ? sidesView(data) : null)]);
  if (data.decoder.length) {
    // Steps of a run may be tokens, batches or iterations of training: only a text model is called a decoder.
    const text = data.decoder.some((part) => part.model || part.layers?.unit === "token");
    const name = text ? "Decoder" : "Steps";
    blocks.unshift(["decoder", name, section("decoder", name, text ? plural(data.decoder.length, "shape") : "", decoderView(state, add))]);
  }
  if (data.diagnosis) blocks.push(["diagnosis", "Diagnosis", section("diagnosis", "Diagnosis", "", diagnosisView(state, data.diagnosis))]);
  let table: RowTable | null = null;
  if (rows.count) {
    table = add(new RowTable(state));
    blocks.push(["tensors", "Tensors", section("tensors", "All tensors", `${count(rows.count)} rows`, table.element, h("div", { class: "print-rows" }))]);
  }
  const bar = h(
    "nav",
    { class: "bar", "aria-label": "Parts of the page" },
    h("a", { href: "#top", class: "mark" }, "Driftline"),
    ...blocks.map(([id, name]) => h("a", { href: `#${id}` }, name)),
    themeButton(() => themed.forEach((view) => view.retheme())),
  );
  app.before(bar);
  for (const [, , block] of blocks) app.append(block);
  app.append(h("footer", null, `${data.made.by}, ${data.made.at.replace("T", " ").replace("+00:00", " UTC")}. ${source.kind === "embedded" ? "This file is complete: it loads nothing and sends nothing." : "Served to this machine only; reload the page when a run has grown."}`));
  if (!state.follow()) {
    const site = data.verdict.site ?? data.diagnosis?.first_site ?? null;
    const fallback = rows.count ? worstSite(state) : null;
    const chosen = site !== null && rows.hasSite(site) ? site : fallback;
    if (chosen !== null) {
      const first = data.verdict.row;
      const keep = location.href;
      state.choose(chosen, first !== null && rows.site(first) === chosen ? first : -1, "start");
      history.replaceState(null, "", keep); // an address that nobody asked for stays as it is
    }
  }
  document.addEventListener("keydown", (event) => {
    const inField = (event.target as Element).closest("input, select, textarea");
    if (event.key === "/" && !inField && !event.defaultPrevented) {
      event.preventDefault();
      document.querySelector<HTMLInputElement>("#modules input[type=search]")?.focus();
    }
  });
  // Paper is white: the page is drawn in light colours for it, and put back afterwards.
  const root = document.documentElement.dataset;
  let theme: string | undefined;
  addEventListener("beforeprint", () => {
    theme = root["theme"];
    root["theme"] = "light";
    themed.forEach((view) => view.retheme());
    const place = document.querySelector(".print-rows");
    if (place && table) place.replaceChildren(table.printed(60));
  });
  addEventListener("afterprint", () => {
    if (theme === undefined) delete root["theme"];
    else root["theme"] = theme;
    themed.forEach((view) => view.retheme());
  });
  // A link inside the page to a site shows the site, wherever the reader is.
  document.addEventListener("click", (event) => {
    const link = (event.target as Element).closest<HTMLAnchorElement>('a[href^="#site="]');
    if (!link || link.closest("#site")) return;
    if (link.hash === location.hash) state.follow();
    document.getElementById("site")?.scrollIntoView({ block: "nearest" });
  });
}

function worstSite(state: State): string | null {
  let best = -1;
  let most = -1;
  for (let row = 0; row < state.rows.count; row++) {
    const severity = state.rows.compared(row) && state.rows.port(row) === "output" ? (state.rows.severity(row) ?? 0) : -0.5;
    if (severity > most) {
      most = severity;
      best = row;
    }
  }
  return best < 0 ? null : state.rows.site(best);
}
