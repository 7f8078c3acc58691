"""What merging did and gained: counted while a model runs, kept, and told."""
