"""Code shared by tests: writers of other tools' dumps, small models, commands and browsers."""
