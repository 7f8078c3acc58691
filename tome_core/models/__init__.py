"""A host's model: where its transformer blocks lie, and how one of its methods is wrapped and set free again."""
