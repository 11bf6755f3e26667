// Elements from values. Text goes in as text nodes only: names of strangers stay text.

export type Child = Node | string | number | null | undefined | false;
type Handler = (event: never) => void;
export interface Props {
  [name: string]: string | number | boolean | null | undefined | Record<string, Handler>;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props | null = null,
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  dress(element, props, children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function s<K extends keyof SVGElementTagNameMap>(
  tag: K,
  props: Props | null = null,
  ...children: Child[]
): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  dress(element, props, children);
  return element;
}

function dress(element: Element, props: Props | null, children: Child[]): void {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value as Record<string, Handler>))
        element.addEventListener(event, handler as EventListener);
    } else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, ...children);
}

export function put(element: Element, ...children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function clear(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  put(element, ...children);
}

/** A sentence with names between backticks, as a terminal shows them. */
export function prose(sentence: string): Child[] {
  return sentence.split("`").map((piece, index) => (index % 2 ? h("code", null, piece) : piece));
}

/** A dotted name that may break after its dots, and nowhere else. */
export function dotted(name: string): DocumentFragment {
  const whole = document.createDocumentFragment();
  for (const part of name.split(/(?<=[./])/)) whole.append(part, document.createElement("wbr"));
  return whole;
}

/** Remembers a choice for the next visit, where the browser lets a file do so. */
export function kept(name: string, value?: string): string | null {
  try {
    if (value !== undefined) localStorage.setItem(`driftline.${name}`, value);
    return localStorage.getItem(`driftline.${name}`);
  } catch {
    return null;
  }
}
