"""One run: from a recipe to a folder with a model, its numbers and its card."""
