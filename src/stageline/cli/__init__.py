"""The stageline command: main, and one file per subcommand."""
