"""The commands of the ``hybridflow`` program; ``cli`` parses and dispatches."""
