"""Expected outputs of models, kept in files and checked by pytest."""
