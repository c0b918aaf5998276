"""Floor 5: the command line. One file per command: parse, build, call."""
