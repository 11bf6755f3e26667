// What is chosen, who wants to know, and the fragment of the address that says it.

import type { DiagnosisData, PageData, SiteFinding, Source } from "./source";
import { Rows } from "./rows";

export interface Choice {
  site: string;
  row: number;
}

type Listener = (choice: Choice | null, by: string) => void;

export class State {
  readonly rows: Rows;
  choice: Choice | null = null;
  /** The step in which the drift starts; null where there is only one. Later ones may be of other inputs. */
  readonly step: number | null;
  private readonly listeners: Listener[] = [];
  private readonly findings = new Map<string, SiteFinding[]>();

  constructor(
    readonly data: PageData,
    readonly source: Source,
  ) {
    this.rows = new Rows(data);
    const { row } = data.verdict;
    this.step = this.rows.steps.length > 1 && row !== null ? this.rows.step(row) : null;
    for (const found of (data.diagnosis as DiagnosisData | null)?.sites ?? []) {
      const known = this.findings.get(found.site);
      if (known) known.push(found);
      else this.findings.set(found.site, [found]);
    }
    addEventListener("hashchange", () => this.follow());
  }

  findingsOf(site: string): SiteFinding[] {
    return this.findings.get(site) ?? [];
  }

  /** Those of some rows that say how bad things were where the drift starts. */
  inStep(rows: number[]): number[] {
    return this.step === null ? rows : rows.filter((row) => this.rows.step(row) === this.step);
  }

  onChoice(listener: Listener): void {
    this.listeners.push(listener);
  }

  /** Show a site, or one of its tensors; the address then names it. */
  choose(site: string, row = -1, by = ""): void {
    if (row < 0) row = this.rows.leading(site);
    if (this.choice?.site === site && this.choice.row === row) return;
    this.choice = { site, row };
    const wanted = this.fragment(site, row);
    if (location.hash !== wanted) history.replaceState(null, "", wanted);
    for (const listener of this.listeners) listener(this.choice, by);
  }

  /** A link to a site: always names the site, and the tensor where it is not the usual one. */
  fragment(site: string, row = -1): string {
    const own = `#site=${encodeURIComponent(site)}`;
    if (row < 0 || row === this.rows.leading(site)) return own;
    return `${own}&row=${row}`;
  }

  /** What the address asks for, if the page has it. */
  follow(): boolean {
    const asked = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
    const site = asked.get("site");
    if (site === null) return false;
    const row = Number(asked.get("row") ?? -1);
    const fits = Number.isInteger(row) && row >= 0 && row < this.rows.count && this.rows.site(row) === site;
    if (!this.rows.hasSite(site)) return false;
    this.choose(site, fits ? row : -1, "address");
    return true;
  }
}
