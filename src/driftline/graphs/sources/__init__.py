"""Sources of graphs: recorded calls, runs, exported models, compilers' texts."""
