// Text models: which tokens fail, of which prompts, and in which layer it begins.

import type { State } from "./state";
import { h } from "./dom";

interface Themed {
  retheme(): void;
}

export function decoderView(state: State, _add: <T extends Themed>(view: T) => T): HTMLElement {
  return h("div", { class: "decoder" }, ...state.data.decoder.map((part) => h("p", null, part.sentence)));
}
