"""The command line: words become calls of the Python API, results become text and an exit code.

`app` lists the commands and reads their words, `options` holds the options that commands share,
`commands/` has the functions themselves. Nothing is measured, aligned or judged in this package:
whatever a command does can be done without it, and `--python` prints how.
"""
