// The container of docs/report-format.md: JSON, and arrays beside it that are mapped, not copied.

export type Numbers = Float64Array | Float32Array | Int32Array | Uint32Array | Uint16Array | Uint8Array | number[];

const KINDS = {
  f64: Float64Array,
  f32: Float32Array,
  i32: Int32Array,
  u32: Uint32Array,
  u16: Uint16Array,
  u8: Uint8Array,
} as const;

export function unpack<T>(buffer: ArrayBuffer): T {
  const head = new DataView(buffer);
  if (buffer.byteLength < 8 || head.getUint32(0, true) !== 0x31504c44) throw new Error("this is no data of a page");
  const length = head.getUint32(4, true);
  const start = 8 + length;
  const text = new TextDecoder().decode(new Uint8Array(buffer, 8, length));
  return whole(JSON.parse(text)) as T;

  function whole(value: unknown): unknown {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) {
      // Lists of plain text are the long ones, and hold no arrays.
      if (value.length && typeof value[0] === "string") return value;
      for (let i = 0; i < value.length; i++) value[i] = whole(value[i]);
      return value;
    }
    const found = value as Record<string, unknown>;
    if (typeof found["$"] === "string" && found["$"] in KINDS && typeof found["at"] === "number") {
      const kind = KINDS[found["$"] as keyof typeof KINDS];
      return new kind(buffer, start + (found["at"] as number), found["n"] as number);
    }
    for (const key of Object.keys(found)) found[key] = whole(found[key]);
    return found;
  }
}

/** A number as JSON has it: the infinities and NaN are words there. */
export function figure(value: unknown): number {
  if (typeof value === "number") return value;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return NaN;
}
