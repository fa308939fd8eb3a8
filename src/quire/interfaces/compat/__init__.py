"""Other engines' names: what they are called there, what they are called here, and what is different."""
