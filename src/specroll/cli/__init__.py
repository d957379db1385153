"""The command line. One file per command; `main` is the frame that finds, parses and runs them."""
