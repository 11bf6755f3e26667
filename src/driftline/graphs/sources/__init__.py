"""Sources of graphs: recorded calls, runs, exported models, texts of compilers."""
