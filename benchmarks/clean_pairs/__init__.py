"""Clean pairs of many architectures, gross faults in the same models, and who is accused."""
