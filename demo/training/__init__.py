"""How the models were trained: scenes, the loss on them, the gates. Drawing needs none of it."""
