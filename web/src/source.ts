// Where the page gets its data: from the file it stands in (`embedded`), or from a server that also
// reads tensors (`remote`, in remote.ts). docs/report-format.md describes what is given.

import { unpack, type Numbers } from "./packing";

export type Json = string | number | boolean | null | Json[] | { [key: string]: Json };

export type ColumnData =
  | { same: string | number | null; n: number }
  | { words: string[]; codes: Numbers }
  | { numbers: Numbers; absent: Numbers | null };

export interface MetricAbout {
  name: string;
  direction: "lower" | "higher" | "zero" | "none";
  meaning: string;
  unit: string;
}

export interface SideData {
  name: string;
  path: string;
  facts: [string, string][];
  losses: string[];
}

export interface Difference {
  what: string;
  reference: string;
  candidate: string;
  weight: "numbers" | "other";
}

export interface VerdictData {
  status: "pass" | "fail" | "incomplete" | "incomparable" | "unjudged";
  sentence: string;
  site: string | null;
  row: number | null;
  class: string;
  cause: null | { kind: string; sentence: string; confidence: number; by: string };
  coverage: { compared: number; missing: number; extra: number; incomparable: number };
  failing: number;
  limits: string;
  notes: string[];
}

export interface Line {
  rows: Numbers;
  noise: { [metric: string]: { low: Numbers; high: Numbers } };
  noise_from: string;
}

export interface Pictures {
  row: number;
  histogram: null | {
    edges: Numbers;
    reference: Numbers;
    candidate: Numbers;
    scale?: "symlog";
    nonfinite: { reference: Record<string, number>; candidate: Record<string, number> };
  };
  error: null | { edges: Numbers; counts: Numbers; zero: number };
  heat: null | {
    height: number;
    width: number;
    values: Numbers;
    rows: { called: string; extent: number };
    columns: { called: string; extent: number };
    value: string;
  };
  bad: { axis: string; extent: number; index: Numbers; share: Numbers; value: Numbers; sentence: string }[];
  values: { at: string; reference: number | string; candidate: number | string }[];
  note: string;
}

export interface Choice {
  token: number;
  text: string;
  probability: number;
}

export interface DecoderPart {
  model: string;
  shape: Record<string, string | number>;
  reference: string;
  candidate: string;
  verdict: "pass" | "fail" | "unjudged";
  sentence: string;
  checks: {
    name: string;
    limit: number;
    from: string;
    failing: number;
    kept: number;
    rate: number;
    low: number;
    high: number;
    allowed: number;
    passed: boolean;
  }[];
  tokens: null | { count: number; columns: Record<string, ColumnData> };
  prompts: { seed: number; prompt: number; name: string; kept: number; failing: Record<string, number> }[];
  first: null | {
    seed: number;
    prompt: number;
    name: string;
    position: number;
    token: number;
    text: string;
    before: string;
    values: Record<string, number>;
    reference: Choice[];
    candidate: Choice[];
  };
  layers: null | {
    sites: string[];
    passes: Pass[];
    steps: Numbers;
    unit: "token" | "step";
    metric: string;
    values: Numbers;
    limit: Numbers;
    status: Numbers;
  };
}

export interface SiteFinding {
  site: string;
  order: number;
  status: string;
  direction: string;
  class: string;
  error: number | string | null;
  error_in: number | string | null;
  noise: number | string | null;
  ratio: number | string | null;
  projection: number | string | null;
  z: number | string | null;
  cause: string | null;
  inside: string | null;
  reason: string;
}

export interface DiagnosisData {
  verdict: string;
  first_site: string | null;
  culprits: string[];
  cause: string;
  confidence: number;
  false_alarm_rate: number | null;
  explains: number | null;
  finding: string[];
  evidence: { [key: string]: Json };
  sites: SiteFinding[];
  needs: string[];
}

/** The parts of a training step, in order of execution. */
export const PASSES = ["forward", "backward", "optimizer"] as const;
export type Pass = (typeof PASSES)[number];

export interface PageData {
  schema: string;
  made: { by: string; at: string };
  title: string;
  verdict: VerdictData;
  sides: { reference: SideData; candidate: SideData; differences: Difference[]; same: [string, string][] };
  metrics: MetricAbout[];
  rows: { count: number; columns: Record<string, ColumnData>; metrics: Record<string, ColumnData> };
  tree: { count: number; name: string[]; site: (string | null)[]; parent: Numbers; class: string[] };
  depth: Record<Pass, Line | null>;
  flow: null | { source: string; sites: string[]; from: Numbers; to: Numbers };
  pictures: Record<string, Pictures>;
  decoder: DecoderPart[];
  diagnosis: DiagnosisData | null;
}

/** Draws what only a server can give about one row; see tensor*.ts. */
export interface TensorPanel {
  show(row: number, into: HTMLElement): void;
}

export interface Source {
  readonly kind: "embedded" | "remote";
  page(): Promise<PageData>;
  pictures(row: number): Promise<Pictures | null>;
  readonly tensors: TensorPanel | null;
}

export class Embedded implements Source {
  readonly kind = "embedded";
  readonly tensors = null;
  private data: PageData | null = null;

  constructor(private readonly element: HTMLElement) {}

  async page(): Promise<PageData> {
    const bytes = decoded((this.element.textContent ?? "").trim());
    const plain = new Blob([bytes as BlobPart]).stream().pipeThrough(new DecompressionStream("gzip"));
    this.data = unpack<PageData>(await new Response(plain).arrayBuffer());
    return this.data;
  }

  async pictures(row: number): Promise<Pictures | null> {
    return this.data?.pictures[String(row)] ?? null;
  }
}

function decoded(text: string): Uint8Array {
  const quick = (Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array }).fromBase64;
  if (quick) return quick(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}
