// The page's data from the server it came from; addresses are relative, so the token stays in them.

import { unpack } from "./packing";
import { Rows } from "./rows";
import type { PageData, Pictures, Source, TensorPanel } from "./source";

export interface ViewData {
  generation: number;
  tensors: boolean;
}

/** Why a question was not answered, in the server's words. */
export class Refusal extends Error {
  constructor(
    message: string,
    readonly hint: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export type Asked = Record<string, string | number>;

export class Remote implements Source {
  readonly kind = "remote";
  tensors: TensorPanel | null = null;
  private generation = 0;
  private rows: Rows | null = null;

  constructor(private readonly panel: (remote: Remote, rows: Rows) => TensorPanel) {}

  async page(): Promise<PageData> {
    const data = await fetched<PageData & { view: ViewData }>("api/page");
    this.generation = data.view.generation;
    if (data.view.tensors) {
      this.rows = new Rows(data);
      this.tensors = this.panel(this, this.rows);
    }
    return data;
  }

  /** Whether a row was measured from values; of other rows there is nothing to ask. */
  hasValues(row: number): boolean {
    return this.rows !== null && this.rows.compared(row) && ["values", "sample"].includes(this.rows.text("basis")(row));
  }

  async pictures(row: number): Promise<Pictures | null> {
    if (!this.hasValues(row)) return null;
    try {
      return await this.ask<Pictures>("pictures", { row });
    } catch (trouble) {
      return { row, histogram: null, error: null, heat: null, bad: [], values: [], note: said(trouble) };
    }
  }

  /** One question of docs/report-format.md about the tensors of a row. */
  ask<T>(question: string, asked: Asked, signal?: AbortSignal): Promise<T> {
    const words = new URLSearchParams({ page: String(this.generation) });
    for (const [name, value] of Object.entries(asked)) words.set(name, String(value));
    return fetched<T>(`api/${question}?${words}`, signal);
  }
}

async function fetched<T>(address: string, signal?: AbortSignal): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(address, { signal: signal ?? null, cache: "no-store" });
  } catch (trouble) {
    if (trouble instanceof DOMException && trouble.name === "AbortError") throw trouble;
    throw new Refusal("the server does not answer", "is `driftline view` still running?", 0);
  }
  if (answer.ok) return unpack<T>(await answer.arrayBuffer());
  const found = (await answer.json().catch(() => ({}))) as { error?: string; hint?: string };
  throw new Refusal(found.error ?? answer.statusText, found.hint ?? "", answer.status);
}

export function isAbort(trouble: unknown): boolean {
  return trouble instanceof DOMException && trouble.name === "AbortError";
}

export function said(trouble: unknown): string {
  if (trouble instanceof Refusal) return trouble.hint ? `${trouble.message} (${trouble.hint})` : trouble.message;
  return trouble instanceof Error ? trouble.message : String(trouble);
}
