"""Where work is done: in other processes of this machine, or on the machines of a Ray cluster."""
