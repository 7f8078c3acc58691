"""Pictures with and without token merging, from a small model that is part of the repository."""
