"""The attention that a site computes: read from its tensors, then changed until it errs alike."""
