// The report: a page whose data stand in its own file.

import { Embedded } from "./source";
import { start } from "./page";

void start(() => new Embedded(document.getElementById("data")!));
