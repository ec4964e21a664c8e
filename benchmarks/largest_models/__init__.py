"""Which systems there are, what a rank of theirs does under its limit, and how the largest size is looked for."""
