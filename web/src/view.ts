// The viewer: the same page, over a server that also reads tensors.

import { Remote } from "./remote";
import { start } from "./page";
import { Tensors } from "./tensor";

void start(() => new Remote((remote, rows) => new Tensors(remote, rows)));
