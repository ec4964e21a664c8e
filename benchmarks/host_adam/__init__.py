"""Other systems' host updates, each in an interpreter of its own."""
