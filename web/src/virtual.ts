// A list of any length in a box: only the rows in view exist, and they are used again.

const TALLEST = 8_000_000; // browsers lose count of pixels beyond some tens of millions

export class VirtualList {
  private total = 0;
  private readonly sizer = document.createElement("div");
  private readonly pool: { element: HTMLElement; index: number }[] = [];
  private waiting = false;
  private viewHeight = 0;

  constructor(
    private readonly scroller: HTMLElement,
    private readonly rowHeight: number,
    private readonly make: () => HTMLElement,
    private readonly fill: (element: HTMLElement, index: number) => void,
    private readonly head = 0,
  ) {
    this.sizer.className = "sizer";
    scroller.append(this.sizer);
    scroller.addEventListener("scroll", () => this.soon(), { passive: true });
    new ResizeObserver(() => {
      this.viewHeight = scroller.clientHeight;
      this.soon();
    }).observe(scroller);
    this.viewHeight = scroller.clientHeight;
  }

  get body(): HTMLElement {
    return this.sizer;
  }

  setCount(total: number): void {
    this.total = total;
    this.sizer.style.height = `${this.height()}px`;
    this.refresh();
  }

  /** Fill every row in view again. */
  refresh(): void {
    for (const row of this.pool) row.index = -1;
    this.draw();
  }

  /** Bring a row into view, with some rows around it. */
  reveal(index: number, align: "near" | "middle" = "near"): void {
    const top = this.topOf(index);
    const view = this.scroller.clientHeight - this.head;
    const at = this.scroller.scrollTop;
    if (align === "middle") this.scroller.scrollTop = Math.max(0, top - view / 2);
    else if (top < at + this.rowHeight) this.scroller.scrollTop = Math.max(0, top - this.rowHeight);
    else if (top + 2 * this.rowHeight > at + view) this.scroller.scrollTop = top + 2 * this.rowHeight - view;
    this.draw();
  }

  elementOf(index: number): HTMLElement | null {
    return this.pool.find((row) => row.index === index)?.element ?? null;
  }

  private height(): number {
    return Math.min(TALLEST, this.total * this.rowHeight);
  }

  private scale(): number {
    const whole = this.total * this.rowHeight;
    return whole > TALLEST ? whole / TALLEST : 1;
  }

  private topOf(index: number): number {
    return (index * this.rowHeight) / this.scale();
  }

  private soon(): void {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  private draw(): void {
    const view = this.viewHeight || this.scroller.clientHeight;
    const shown = Math.ceil(view / this.rowHeight) + 6;
    const scale = this.scale();
    const at = this.scroller.scrollTop;
    const first = Math.max(0, Math.min(this.total - shown, Math.floor((at * scale) / this.rowHeight) - 3));
    while (this.pool.length < Math.min(shown, this.total)) {
      const element = this.make();
      this.sizer.append(element);
      this.pool.push({ element, index: -1 });
    }
    // Where the list is taller than a browser can be, rows are placed around what is in view.
    const base = scale === 1 ? 0 : at - ((at * scale) / this.rowHeight) * this.rowHeight;
    const size = this.pool.length;
    for (let k = 0; k < size; k++) {
      const index = first + k;
      const row = this.pool[index % size];
      const shows = k < shown && index < this.total;
      if (!shows) {
        if (row.index !== -2) row.element.hidden = true;
        row.index = -2;
        continue;
      }
      if (row.index !== index || scale !== 1) {
        row.element.style.transform = `translateY(${base + index * this.rowHeight}px)`;
      }
      if (row.index !== index) {
        if (row.element.hidden) row.element.hidden = false;
        this.fill(row.element, index);
        row.index = index;
      }
    }
  }
}
