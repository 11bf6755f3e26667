// Text models: which tokens fail, of which prompts, and in which layer it begins.

import type { Choice, DecoderPart } from "./source";
import type { State } from "./state";
import { h, s, clear } from "./dom";
import { count, fig, percent, plural } from "./format";
import { lineColour } from "./colour";
import { figure } from "./packing";
import { numberColumn, textColumn, type NumberOf, type TextOf } from "./rows";
import { paintMap, scaleBar } from "./pictures";

interface Themed {
  retheme(): void;
}

const CALLED: Record<string, string> = { ce: "cross entropy (ce)", diff_mean: "mean difference" };

export function decoderView(state: State, add: <T extends Themed>(view: T) => T): HTMLElement {
  const parts = state.data.decoder;
  const body = h("div");
  const worst = parts.findIndex((part) => part.verdict === "fail");
  let at = Math.max(0, worst);
  const tabs = h("div", { class: "segmented", role: "group", "aria-label": "Model and shape" });
  const draw = () => {
    clear(
      tabs,
      ...parts.map((part, index) =>
        h(
          "button",
          {
            type: "button",
            "aria-pressed": String(index === at),
            on: {
              click: () => {
                at = index;
                draw();
              },
            },
          },
          shapeName(part),
          part.verdict !== "unjudged" && h("small", null, part.verdict),
        ),
      ),
    );
    clear(body, partView(state, parts[at]));
  };
  draw();
  add({ retheme: draw });
  return h("div", { class: "decoder" }, parts.length > 1 && tabs, body);
}

function shapeName(part: DecoderPart): string {
  const { batch_size, seq_length, max_new_tokens, dtype } = part.shape;
  if (batch_size === undefined) return "steps";
  return `batch ${batch_size}, length ${seq_length}, ${max_new_tokens} new, ${dtype}`;
}

function partView(state: State, part: DecoderPart): HTMLElement {
  const tokens = part.tokens ? new Tokens(part) : null;
  return h(
    "div",
    { class: "decoder-part" },
    part.sentence && part.sentence !== state.data.verdict.sentence && h("p", { class: "lede" }, part.verdict !== "unjudged" && h("span", { class: `badge small ${part.verdict}` }, part.verdict), " ", part.sentence),
    part.checks.length > 0 && checks(part),
    h(
      "div",
      { class: "decoder-grid" },
      part.first && firstFailure(part),
      ...(tokens ? ["ce", "diff_mean"].map((name) => distribution(part, tokens, name)) : []),
      part.prompts.length > 0 && part.checks.length > 0 && prompts(part),
      tokens && strip(part, tokens),
      part.layers && layerMap(state, part.layers),
    ),
  );
}

class Tokens {
  readonly count: number;
  private readonly readers = new Map<string, NumberOf>();

  constructor(private readonly part: DecoderPart) {
    this.count = part.tokens!.count;
  }

  of(name: string): NumberOf {
    let read = this.readers.get(name);
    if (!read) this.readers.set(name, (read = numberColumn(this.part.tokens!.columns[name])));
    return read;
  }

  text(name: string): TextOf {
    return textColumn(this.part.tokens!.columns[name]);
  }
}

function checks(part: DecoderPart): HTMLElement {
  return h(
    "div",
    { class: "scroll-x" },
    h(
      "table",
      { class: "plain" },
      h("thead", null, h("tr", null, ...["check", "failing tokens", "rate", "95 % interval", "allowed below", "a token fails from", "limit from"].map((name) => h("th", null, name)))),
      h(
        "tbody",
        null,
        ...part.checks.map((check) =>
          h(
            "tr",
            { class: `decides ${check.passed ? "pass" : "fail"}` },
            h("td", null, h("span", { class: `badge small ${check.passed ? "pass" : "fail"}` }, check.passed ? "pass" : "fail"), ` ${CALLED[check.name] ?? check.name}`),
            h("td", null, `${count(check.failing)} of ${count(check.kept)}`),
            h("td", null, percent(check.rate)),
            h("td", null, `${percent(check.low)} to ${percent(check.high)}`),
            h("td", null, percent(check.allowed)),
            h("td", null, fig(check.limit)),
            h("td", null, check.from),
          ),
        ),
      ),
    ),
  );
}

function visible(text: string): string {
  // Blanks, line ends and control characters must be seen in a token.
  return text.replace(/[\u0000-\u001f\u007f]/g, (c) => (c === "\n" ? "⏎" : c === "\t" ? "⇥" : "·")).replaceAll(" ", "␣");
}

function tokenName(text: string, token: number): string {
  return text ? `“${visible(text)}”` : `#${token}`;
}

function firstFailure(part: DecoderPart): HTMLElement {
  const first = part.first!;
  const most = Math.max(...first.reference.map((c) => c.probability), ...first.candidate.map((c) => c.probability), 1e-9);
  const side = (name: string, choices: Choice[], colour: string) =>
    h(
      "div",
      null,
      h("h4", null, name),
      choices.length
        ? h(
            "ol",
            { class: "likeliest" },
            ...choices.map((choice) => {
              const bar = h("i", { class: "fill" });
              bar.style.width = `${(100 * choice.probability) / most}%`;
              bar.style.background = colour;
              const same = choice.token === first.token;
              return h("li", { class: same ? "same" : null }, bar, h("code", { title: `token ${choice.token}` }, tokenName(choice.text, choice.token)), h("small", null, `${choice.token}`), h("b", null, percent(choice.probability)));
            }),
          )
        : h("p", { class: "remark" }, "its logits were not saved"),
    );
  return panel(
    "The first failing token",
    h(
      "p",
      null,
      `Round ${first.seed}, prompt ${first.prompt}${first.name ? ` (${first.name})` : ""}, token ${first.position}: the reference says `,
      h("code", null, tokenName(first.text, first.token)),
      `; ${Object.entries(first.values)
        .map(([name, value]) => `${CALLED[name] ?? name} ${fig(figure(value))}`)
        .join(", ")}.`,
    ),
    first.before && h("p", { class: "context" }, "…", visible(first.before).replaceAll("␣", " "), h("mark", null, visible(first.text) || `#${first.token}`)),
    h("div", { class: "two" }, side("Reference’s likeliest", first.reference, lineColour(0)), side("Candidate’s likeliest", first.candidate, lineColour(5))),
  );
}

function panel(title: string, ...inside: (Node | string | null | false)[]): HTMLElement {
  return h("figure", { class: "panel" }, h("figcaption", null, title), ...inside);
}

/** How the scores of all tokens are spread, and where the limit lies among them. */
function distribution(part: DecoderPart, tokens: Tokens, name: string): HTMLElement | null {
  const read = tokens.of(name);
  const values: number[] = [];
  let zeros = 0;
  for (let i = 0; i < tokens.count; i++) {
    const value = read(i);
    if (value === null || !Number.isFinite(value)) continue;
    if (value > 0) values.push(value);
    else zeros++;
  }
  if (!values.length) return null;
  const check = part.checks.find((each) => each.name === name);
  const limit = check ? check.limit : NaN;
  let [low, high] = [Infinity, 0];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (Number.isFinite(limit) && limit > 0) {
    low = Math.min(low, limit);
    high = Math.max(high, limit);
  }
  // A few percent of spread are no decades: an even scale says more then.
  const even = high / low < 20;
  const on = even ? (v: number) => v : Math.log10;
  let [from, to] = [on(low), on(high)];
  const margin = (to - from || Math.abs(to) || 1) * 0.04;
  [from, to] = [from - margin, to + margin];
  const bins = 60;
  const counts = new Array<number>(bins).fill(0);
  for (const value of values) counts[Math.min(bins - 1, Math.floor(((on(value) - from) / (to - from)) * bins))]++;
  const most = Math.max(...counts);
  const [wide, tall, base] = [420, 160, 138];
  const x = (v: number) => 6 + ((on(v) - from) / (to - from)) * (wide - 12);
  const [good, bad] = [lineColour(0), "var(--bad)"];
  const bars = counts.map((n, i) => {
    const left = from + (i / bins) * (to - from);
    const middle = left + (to - from) / bins / 2;
    const beyond = Number.isFinite(limit) && (even ? middle : 10 ** middle) >= limit;
    const size = n ? Math.max(2, (n / most) * (base - 22)) : 0;
    return s("rect", { x: 6 + (i / bins) * (wide - 12), y: base - size, width: (wide - 12) / bins - 1, height: size, fill: beyond ? bad : good });
  });
  const back = (v: number) => (even ? v : 10 ** v);
  return panel(
    `${CALLED[name] ?? name} of ${plural(tokens.count, "token")}`,
    s(
      "svg",
      { viewBox: `0 0 ${wide} ${tall}`, class: "histogram", role: "img", "aria-label": `Distribution of ${name} from ${fig(low)} to ${fig(high)}${check ? `, limit ${fig(limit)}` : ""}` },
      ...bars,
      s("line", { x1: 6, x2: wide - 6, y1: base, y2: base, class: "axis" }),
      s("text", { x: 6, y: tall - 6, class: "tick" }, fig(back(from))),
      s("text", { x: wide / 2, y: tall - 6, class: "tick", "text-anchor": "middle" }, fig(back((from + to) / 2))),
      s("text", { x: wide - 6, y: tall - 6, class: "tick", "text-anchor": "end" }, fig(back(to))),
      ...(Number.isFinite(limit) && limit > 0
        ? [
            s("line", { x1: x(limit), x2: x(limit), y1: 14, y2: base, stroke: bad, "stroke-width": 1.5, "stroke-dasharray": "5 3" }),
            s("text", { x: Math.min(wide - 70, Math.max(70, x(limit))), y: 11, class: "tick bad", "text-anchor": "middle" }, `limit ${fig(limit)}`),
          ]
        : []),
    ),
    h("p", { class: "remark" }, check ? `${count(check.failing)} of ${count(check.kept)} at or above the limit (${percent(check.rate)}, allowed below ${percent(check.allowed)})` : "no limit was given", zeros ? `; ${count(zeros)} are 0` : null),
  );
}

function prompts(part: DecoderPart): HTMLElement {
  const rate = (prompt: DecoderPart["prompts"][number]) => Math.max(0, ...Object.values(prompt.failing)) / Math.max(1, prompt.kept);
  const sorted = [...part.prompts].sort((a, b) => rate(b) - rate(a));
  const names = part.checks.map((check) => check.name);
  return panel(
    `Failing tokens by prompt: ${count(sorted.filter((p) => rate(p) > 0).length)} of ${plural(sorted.length, "prompt")}`,
    h(
      "div",
      { class: "prompt-list", tabindex: 0, role: "region", "aria-label": "Failing tokens by prompt" },
      h(
        "table",
        { class: "plain" },
        h("thead", null, h("tr", null, h("th", null, "round"), h("th", null, "prompt"), ...names.map((name) => h("th", null, name)), h("th", null, "share"))),
        h(
          "tbody",
          null,
          ...sorted.slice(0, 400).map((prompt) => {
            const bar = h("i", { class: "bar bad" });
            bar.style.width = `${Math.min(100, 100 * rate(prompt))}%`;
            return h(
              "tr",
              null,
              h("td", null, prompt.seed),
              h("td", null, `${prompt.prompt}${prompt.name ? ` ${prompt.name}` : ""}`),
              ...names.map((name) => h("td", null, `${count(prompt.failing[name] ?? 0)} of ${count(prompt.kept)}`)),
              h("td", { class: "with-bar" }, bar, h("span", null, percent(rate(prompt)))),
            );
          }),
        ),
      ),
    ),
  );
}

/** Every token of every prompt: prompts downwards, positions to the right. */
function strip(part: DecoderPart, tokens: Tokens): HTMLElement {
  const name = part.checks.find((check) => !check.passed)?.name ?? part.checks[0]?.name ?? "diff_mean";
  const [seed, prompt, position, value] = ["seed", "prompt", "position", name].map((each) => tokens.of(each));
  const lines = new Map<string, number>();
  let wide = 0;
  for (let i = 0; i < tokens.count; i++) {
    const key = `${seed(i)}/${prompt(i)}`;
    if (!lines.has(key)) lines.set(key, lines.size);
    wide = Math.max(wide, (position(i) ?? 0) + 1);
  }
  const tall = lines.size;
  const values = new Float64Array(wide * tall);
  const places = new Int32Array(wide * tall).fill(-1);
  for (let i = 0; i < tokens.count; i++) {
    const at = lines.get(`${seed(i)}/${prompt(i)}`)! * wide + (position(i) ?? 0);
    values[at] = value(i) ?? 0;
    places[at] = i;
  }
  const text = tokens.text("text");
  const ids = tokens.of("token");
  const names = [...lines.keys()];
  return map(
    `${CALLED[name] ?? name}, token by token`,
    tall,
    wide,
    values,
    names.map((name) => `prompt ${name.split("/")[1]}`),
    ["token", Array.from({ length: wide }, (_, x) => x)],
    (y, x) => {
      const i = places[y * wide + x];
      return i < 0 ? "after the end of the text" : `round ${names[y].replace("/", ", prompt ")}, token ${x} ${tokenName(text(i), ids(i) ?? 0)}: ${name} ${fig(value(i))}`;
    },
    null,
  );
}

function layerMap(state: State, layers: NonNullable<DecoderPart["layers"]>): HTMLElement {
  const [tall, wide] = [layers.sites.length, layers.steps.length];
  const { unit, passes } = layers;
  const name = (y: number) => (passes[y] === "forward" ? layers.sites[y] : `${layers.sites[y]} ${passes[y]}`);
  const element = map(
    `${unit === "token" ? "Token" : "Step"} × layer: ${layers.metric}`,
    tall,
    wide,
    layers.values,
    layers.sites.map((_, y) => name(y)),
    [unit, layers.steps],
    (y, x) => {
      const limit = layers.limit[y];
      const failing = layers.status[y * wide + x] === 2 ? ", outside" : "";
      return `${name(y)}, ${unit} ${layers.steps[x]}: ${fig(layers.values[y * wide + x])}${limit > 0 ? ` of ${fig(limit)} allowed${failing}` : ""}`;
    },
    (y) => {
      const site = layers.sites[y];
      if (state.rows.hasSite(site)) {
        state.choose(site);
        document.getElementById("site")?.scrollIntoView({ block: "nearest" });
      }
    },
  );
  element.classList.add("layers");
  return element;
}

function map(
  title: string,
  tall: number,
  wide: number,
  values: ArrayLike<number>,
  down: string[],
  [unit, numbers]: [string, ArrayLike<number>],
  say: (y: number, x: number) => string,
  pick: ((y: number) => void) | null,
): HTMLElement {
  const canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": `${title}: ${tall} by ${wide}. Arrow keys read cells.` });
  const { low, high } = paintMap(canvas, tall, wide, values as Float64Array);
  const told = h("p", { class: "remark told", "aria-live": "polite" }, pick ? "Point at a cell; click to choose its layer." : "Point at a cell.");
  const height = Math.min(420, Math.max(110, tall * 16));
  canvas.style.height = `${height}px`;
  let [cy, cx] = [0, 0];
  const place = (event: PointerEvent) => {
    const box = canvas.getBoundingClientRect();
    cx = Math.min(wide - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * wide)));
    cy = Math.min(tall - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * tall)));
    told.textContent = say(cy, cx);
  };
  canvas.addEventListener("pointermove", place as EventListener);
  canvas.addEventListener("click", () => pick?.(cy));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") cx = Math.min(wide - 1, cx + 1);
    else if (event.key === "ArrowLeft") cx = Math.max(0, cx - 1);
    else if (event.key === "ArrowDown") cy = Math.min(tall - 1, cy + 1);
    else if (event.key === "ArrowUp") cy = Math.max(0, cy - 1);
    else if (event.key === "Enter") return pick?.(cy);
    else return;
    event.preventDefault();
    told.textContent = say(cy, cx);
  });
  const odd = Array.prototype.some.call(values, (v: number) => v === Infinity);
  const element = panel(
    title,
    h(
      "div",
      { class: "map named" },
      h("div", { class: "map-rows", "aria-hidden": "true" }, ...ticks(tall, Math.floor(height / 16), (y) => shortName(down[y]), "top")),
      canvas,
      h("div", { class: "map-steps" }, ...ticks(wide, 8, (x) => String(numbers[x]), "left")),
      h("span", { class: "map-x" }, unit),
    ),
    scaleBar(fig(low), fig(high), odd),
    told,
  );
  element.classList.add("wide");
  return element;
}

/** Names beside a map: as many as have room, evenly spread, each at the middle of its row or column. */
function ticks(count: number, most: number, name: (at: number) => string, side: "top" | "left"): HTMLElement[] {
  const every = Math.ceil(count / most);
  return Array.from({ length: Math.ceil(count / every) }, (_, i) => {
    const tick = h("span", null, name(i * every));
    tick.style[side] = `${(100 * (i * every + 0.5)) / count}%`;
    return tick;
  });
}

/** The end of a long name tells it from its neighbours; whole parts of it, if they have room. */
function shortName(name: string): string {
  const most = innerWidth < 700 ? 15 : 24;
  if (name.length <= most) return name;
  const end = name.slice(1 - most);
  const part = end.indexOf(".");
  return `…${part >= 0 && part < end.length - 1 ? end.slice(part + 1) : end}`;
}
