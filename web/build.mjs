// Bundles the front end into the package: `npm ci && npm run build`. Users need no Node.
// A test (tests/pages/test_bundle.py) builds again and compares.
import { build } from "esbuild";
import { existsSync, readFileSync, writeFileSync, mkdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { basename, join } from "node:path";

const here = fileURLToPath(new URL(".", import.meta.url));
const goal = process.argv[2] ?? join(here, "..", "src", "driftline", "reporting", "html", "bundle");

const made = await build({
  absWorkingDir: here,
  // Two scripts: a report has no use for what only a server can answer.
  entryPoints: { page: "src/main.ts", ...(existsSync(join(here, "src", "view.ts")) ? { view: "src/view.ts" } : {}) },
  bundle: true,
  minify: true,
  write: false,
  outdir: "bundle",
  target: ["es2022"],
  format: "iife",
  charset: "utf8",
  legalComments: "none",
});
const licence = readFileSync(join(here, "node_modules", "uplot", "LICENSE"), "utf8").replace(/\s+/g, " ").trim();
mkdirSync(goal, { recursive: true });
for (const file of made.outputFiles) {
  const name = basename(file.path);
  let text = file.text.trim();
  // The script stands inside a <script> element: nothing in it may look like the element's end.
  if (/<\/script|<!--/i.test(text)) throw new Error("the bundle holds text that would end its element");
  if (/<\/style/i.test(text)) throw new Error("the style sheet holds text that would end its element");
  // A report is a copy of uPlot, too, so its licence goes with it.
  if (name.endsWith(".js")) text = `/* This script contains uPlot. ${licence} */\n${text}`;
  writeFileSync(join(goal, name), text + "\n");
  console.log(`${name} ${text.length}`);
}
