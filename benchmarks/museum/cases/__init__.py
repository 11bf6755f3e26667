"""The cases, one file for each part of a model that people get wrong; each file is a program."""
