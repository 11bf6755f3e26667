"""Labels tensors in pairs: two rounds, a pair that differs, and a label without a partner."""

from __future__ import annotations

import numpy as np

from driftline import gen_id, set_label, set_task_id

values = np.linspace(-1, 1, 6, dtype=np.float32)
for factor in (1.0, 1.5):
    set_task_id()
    number = gen_id()
    set_label("pta", number, data_val=values)
    set_label("acl", number, data_val=values * np.float32(factor))
set_label("pta", gen_id(), data_val=values)
