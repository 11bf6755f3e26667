"""Programs on packages from PyPI, each clean and with one fault planted from outside."""
