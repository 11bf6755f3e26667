"""The command line. Reads words, calls the Python API, prints. It decides nothing about numbers."""
