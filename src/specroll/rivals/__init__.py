"""Other people's methods, built faithfully in our engine, so that a comparison is one of methods."""
