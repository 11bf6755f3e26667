"""One guilty module by itself: what it was given, what it made, what it should make.

Run it as it is to see the error. To try a fix, make `module` return yours: it is called with the
captured inputs, and its result is measured against the right one.
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ABOUT = json.loads((HERE / "repro.json").read_text("utf-8"))


def tensors(begin):
    """Tensors whose name begins so, by the rest of their name."""
    return {
        name[len(begin):]: np.load(HERE / about["file"], allow_pickle=False)
        for name, about in ABOUT["tensors"].items()
        if name.startswith(begin)
    }


def module(inputs, params):
    """Put the module here: a dict of outputs by slot; None to look at the captured ones only."""
    return None


def show(title, right, made):
    for slot in right.keys() & made.keys():
        r, c = right[slot].astype(np.float64), made[slot].astype(np.float64)
        both = np.isfinite(r) & np.isfinite(c)
        e, r = np.where(both, c - r, 0.0), np.where(both, r, 0.0)
        size = max(float(np.sum(r * r)), 1e-300)
        print(
            f"{title} {slot}: relative error {np.sqrt(np.sum(e * e) / size):.4g}, "
            f"lean {np.sum(e * r) / size:+.4g}, not finite {int(np.sum(~both))}"
        )


def main():
    print("\n".join(ABOUT["finding"]))
    print(f"{ABOUT['site']} ({ABOUT['class']}), weights {ABOUT['weights']}")
    right = tensors("exact.output.")
    which = "reference's module on the candidate's input"
    if not right:
        right, which = tensors("reference.output."), "reference run"
    print(f"right is: the {which}")
    show("candidate", right, tensors("candidate.output."))
    made = module(tensors("candidate.input."), tensors("param."))
    if made is not None:
        show("yours", right, made)


if __name__ == "__main__":
    main()
