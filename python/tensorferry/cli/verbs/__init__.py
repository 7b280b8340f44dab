"""The verbs of the command: a file for each, with a function of its name, whose docstring is its help."""
