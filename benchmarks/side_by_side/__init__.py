"""Systems that train the same model on the same data, each in processes of its own, stepped in turn."""
